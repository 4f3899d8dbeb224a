"""Messages to the tokens that the engine is given, in the model's chat template.

A conversation is appended to: what the model drew stays as it was drawn, and only what follows a turn is rendered. The
template renders a word in the place of the turn, and what it writes behind that word is what follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast

from megatron_rl.agents.chat_messages import arguments_of
from megatron_rl.agents.plain_text import PlainText, replace_words
from megatron_rl.data.sample import Message
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.tasks.tokenizing import Tools, check_template, encode, template_text

_MARK, _NEXT, _THOUGHT = "TURNENDS", "NEXTENDS", "THOUGHT"
PROBE: tuple[Message, ...] = ({"role": "user", "content": "Go on."},)
_ID, _NAME = "call99999", "NAMEHERE"  # some templates want ids of nine characters
_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


class _Ends(NamedTuple):
    """The texts that a template writes behind a turn."""

    last: str  # behind the content of the last message
    followed: str  # the end of a turn that others follow, up to its special token; empty: it has none
    call: str  # behind the arguments of the last message's call; empty: the template writes no calls
    as_text: bool  # the template takes a call's arguments as JSON, not as a mapping


class Renderer:
    """A chat template and a tokenizer. It changes neither, so threads may share it.

    Args:
        params: `template_params` of the task.

    Raises:
        ValueError: there is no template.
    """

    def __init__(self, tokenizer: Tokenizer, params: Mapping[str, object]) -> None:
        check_template(tokenizer, params.get("chat_template"))
        self.tokenizer, self.params = tokenizer, params
        self._template = str(params.get("chat_template") or tokenizer.chat_template)

    def first(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The prompt's tokens, with the beginning of the model's turn: those that a task's prompts have."""
        return encode([self._text(messages, tools)], self.tokenizer)[0]

    def whole(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of messages whoever wrote them, with the beginning of the model's turn. Their text is text, as in
        `following`.

        Raises:
            ValueError: the template refuses the messages, or the tokenizer lacks a character.
        """
        safe, word_of, _ = self._guard(messages, tools)
        text = self._text(list(map(self._as_read, safe)), tools)
        words = {word: token for token, word in word_of.items() if word in text}
        return self._plain_text.encode(text, words) if words else encode([text], self.tokenizer)[0]

    def following(self, messages: Sequence[Message], count: int, tools: Tools, ended: int | None) -> list[int]:
        """The tokens behind the policy's turn `messages[count - 1]`: the end of the turn, the messages from `count` on, and
        the beginning of the next turn.

        A message's text is text: where it has that of a special token, or of one that the template writes around
        messages, it is encoded as any other.

        Args:
            ended: the drawn token that ended the turn, in whose place the template's is left out; None: the turn was cut.

        Raises:
            ValueError: the template refuses the messages or leaves the turn out, or the tokenizer lacks a character.
        """
        text, words = self._behind(messages, count, tools)
        ids = self._encode(text, words)
        if ended is None:
            return ids
        if (end := self._ends.followed) and text.startswith(end):
            closing = self._special.findall(end)[-1]
            return ids[ids.index(self._ids[closing]) + 1 :]
        return ids[1:] if ids[0] == ended else ids  # where the next message's first token ends a turn

    def rewrites(self) -> str | None:
        """Where this template writes an earlier turn otherwise than the model saw or wrote it, in words; None: nowhere.

        Conversations are appended to whatever it does: the model goes on to see its turns as it wrote them.
        """
        rewritten = []
        begun, followed = self._begun_and_followed({}, None)
        for written, where in (
            (self._text(PROBE, None), "with which a turn begins"),
            (begun, "before a last turn's text"),
        ):
            if not followed.startswith(written):
                rewritten.append(f"{_left_out(written, followed)!r}, {where}, is left out of earlier turns")
                break
        within = f"<think>\n{_THOUGHT}\n</think>\n\n{_MARK}"
        for key, value in (("content", within), ("reasoning_content", _THOUGHT), ("thinking", _THOUGHT)):
            begun, followed = self._begun_and_followed({key: value}, None)
            if _THOUGHT not in followed and (value is within or _THOUGHT in begun):
                rewritten.append("the thinking of earlier turns is left out")
                break
        if self._ends.call and not rewritten:
            begun, followed = self._begun_and_followed({}, [_TOOL])
            if not followed.startswith(begun):
                rewritten.append("the tools are written in another place once others follow")
        if (left_out := self._left_out_before_calls()) and not any(repr(left_out) in said for said in rewritten):
            rewritten.append(f"{left_out!r}, behind a tool's reply, is left out where the turn behind it calls")
        if not self._ends.last.startswith(self._ends.followed):
            rewritten.append(f"a turn ends with {self._ends.followed!r}, and the last one with {self._ends.last!r}")
        if "strftime_now" in self._template:
            rewritten.append("the prompt has the date of the day")
        return "; ".join(rewritten) or None

    def written_call(self) -> str | None:
        """A call as a model writes that is trained on this template, to the end of its turn; None: the template has none."""
        if not self._ends.call:
            return None
        function = {"name": "look", "arguments": {"what": "lamp"}}
        turn: Message = {"role": "assistant", "tool_calls": [{"id": _ID, "type": "function", "function": function}]}
        asked, begun = (self.text(PROBE, [_TOOL], begins) for begins in (False, True))
        written = self.text([*PROBE, turn], [_TOOL], False).removeprefix(asked)
        begins = begun.removeprefix(asked).partition("<think>")[0]  # which not every template writes before a call
        return written.removeprefix(begins).removesuffix(self._ends.last)

    def _left_out_before_calls(self) -> str:
        """Returns what stands between a tool's reply and the next turn, and is not there once that turn has called a tool."""
        if not self._ends.call:
            return ""
        call = _marked_call({"id": _ID}, _MARK)
        called: Message = {"role": "assistant", "tool_calls": [call]}
        asked: list[Message] = [*PROBE, called, {"role": "tool", "tool_call_id": _ID, "content": _NEXT}]
        try:
            written, followed = self.text(asked, None, True), self.text([*asked, called], None, False)
        except ValueError:  # the template knows no replies
            return ""
        return "" if followed.startswith(written) else _left_out(written, followed)

    def _begun_and_followed(self, changes: Message, tools: Tools) -> tuple[str, str]:
        """A conversation up to the text of its last turn, and the whole of one where the user goes on."""
        turn: Message = {"role": "assistant", "content": _MARK, **changes}
        last = self.text([*PROBE, turn], tools, False)
        follow_up: Message = {"role": "user", "content": _NEXT}
        return last.partition(_MARK)[0], self.text([*PROBE, turn, follow_up], tools, True)

    def text(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool) -> str:
        """The template's text of whole messages, as it reads them."""
        return self._text(list(map(self._as_read, messages)), tools, add_generation_prompt)

    def _text(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = True) -> str:
        return template_text(self.tokenizer, messages, tools or None, self.params, add_generation_prompt)

    def _behind(self, messages: Sequence[Message], count: int, tools: Tools) -> tuple[str, dict[str, str]]:
        """The template's text behind a turn, and the words in it that stand for tokens' texts in messages."""
        safe, word_of, mark = self._guard(messages, tools)
        turn = safe[count - 1]
        marked = [*map(self._as_read, safe[: count - 1]), self._marked(turn, mark), *map(self._as_read, safe[count:])]
        behind = _after(self._text(marked, tools), mark)
        if turn.get("tool_calls"):
            closers = self._closers(cast(list[Message], turn["tool_calls"])[-1])
            if not behind.startswith(closers):
                raise ValueError(
                    f"the chat template ends a turn's call otherwise than {closers!r} where others follow it"
                )
            behind = behind[len(closers) :]
        return behind, {word: token for token, word in word_of.items() if word in behind}

    def _guard(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Message], dict[str, str], str]:
        """The messages with words in the place of tokens' texts, the words by token, and a word more."""
        written = "\n".join([*_strings(messages), self._template, json.dumps(tools, default=str)])
        mark, *words = _words(written, 1 + len(self._guarded))
        word_of = dict(zip(self._guarded, words, strict=True))
        safe = [
            cast(Message, _with_strings(message, lambda text: replace_words(text, word_of))) for message in messages
        ]
        return safe, word_of, mark

    def _marked(self, turn: Message, mark: str) -> Message:
        """The turn with `mark` in the place of what comes last in it."""
        if not turn.get("tool_calls") or not self._ends.call:
            return {"role": "assistant", "content": mark}
        # Templates look back at a call's name and id. Some refuse several calls: the last is enough.
        last = cast(list[Message], turn["tool_calls"])[-1]
        return self._as_read({"role": "assistant", "content": "", "tool_calls": [_marked_call(last, mark)]})

    def _closers(self, call: Message) -> str:
        """The template's text between a call's arguments and the end of the turn."""
        closers = self._ends.call.removesuffix(self._ends.last)
        function = cast(Message, call.get("function", call))
        return closers.replace(_ID, str(call.get("id"))).replace(_NAME, str(function.get("name")))

    def _as_read(self, message: Message) -> Message:
        """The message as templates read it: no None for a text, arguments of calls as the template takes them."""
        message = {key: value for key, value in message.items() if value is not None and value != []}
        message.setdefault("content", "")
        if "tool_calls" in message:
            calls = cast(list[Message], message["tool_calls"])
            message["tool_calls"] = [_with_arguments(call, self._ends.as_text) for call in calls]
        return message

    def _encode(self, text: str, words: Mapping[str, str]) -> list[int]:
        """Token ids of what follows a turn. Some tokenizers put a space before what begins a text: it begins none."""
        anchor = "" if self._special.match(text) else self._anchor
        text = anchor + text
        ids = self._plain_text.encode(text, words) if words else encode([text], self.tokenizer)[0]
        return ids[1:] if anchor else ids

    @cached_property
    def _anchor(self) -> str:
        """A special token; empty where text cannot name the tokenizer's end of sequence."""
        token = self.tokenizer.convert_ids_to_tokens(self.tokenizer.eos_token_id)
        return token if token in self._ids else ""

    @cached_property
    def _ends(self) -> _Ends:
        turn: Message = {"role": "assistant", "content": _MARK}
        last = _after(self._text([*PROBE, turn], None, add_generation_prompt=False), _MARK)
        behind = _after(self._text([*PROBE, turn, {"role": "user", "content": _NEXT}], None), _MARK)
        end = self._special.search(last)
        followed = last[: end.end()] if end else ""
        if not behind.startswith(followed):  # as GPT-OSS's, which ends the last turn by a token of its own
            begun, after_user = self._special.match(behind), self._special.match(_after(behind, _NEXT))
            followed = begun[0] if begun and after_user and begun[0] == after_user[0] else ""
        for as_text in (False, True):  # templates that join arguments to text take no mapping
            call = _with_arguments(_marked_call({"id": _ID}, _MARK), as_text)
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                behind = _after(self._text([*PROBE, turn], None, add_generation_prompt=False), _MARK)
            except ValueError:
                continue
            return _Ends(last, followed, behind, as_text)
        return _Ends(last, followed, "", False)

    @cached_property
    def tokens(self) -> int:
        """One more than the highest id of the tokenizer's."""
        return 1 + max(self.tokenizer.get_vocab().values())

    @cached_property
    def _ids(self) -> dict[str, int]:
        """The tokenizer's special tokens."""
        return {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or r"(?!)")

    @cached_property
    def _guarded(self) -> tuple[str, ...]:
        """The added tokens that no message may write: special ones, and those that the template writes. Others, such as runs
        of spaces, are how text is encoded."""
        template = self._template
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple(t.content for t in added if t.special or (t.content.strip() and t.content in template))

    @cached_property
    def _plain_text(self) -> PlainText:
        return PlainText(self.tokenizer, self._guarded)


def _after(text: str, mark: str) -> str:
    before, marked, behind = text.rpartition(mark)
    if not marked:
        raise ValueError(f"the chat template leaves out the model's turn; it ends with {before[-80:]!r}")
    return behind


def _left_out(written: str, followed: str) -> str:
    """A text from where another differs."""
    pairs = enumerate(zip(written, followed, strict=False))
    return written[next((i for i, (a, b) in pairs if a != b), min(len(written), len(followed))) :]


def _marked_call(call: Message, mark: str) -> Message:
    """A call of the same name and id whose arguments are `mark`."""
    function = cast(Message, call.get("function", {"name": _NAME}))
    return {"type": "function", **call, "function": {**function, "arguments": {mark: mark}}}


def _with_arguments(call: Message, as_text: bool) -> Message:
    """The call with its arguments as JSON, or as the mapping that they are."""
    function = cast(Message, call.get("function", call))
    arguments = arguments_of(function)
    written = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    function = {**function, "arguments": written}
    return {**call, "function": function} if "function" in call else function


def _strings(value: object) -> Iterator[str]:
    """Every text in a message or messages, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (str(key), *_strings(item))
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for item in value:
            yield from _strings(item)


def _with_strings(value: object, change: Callable[[str], str]) -> object:
    """The value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _with_strings(item, change) for key, item in value.items()}
    return [_with_strings(item, change) for item in value] if isinstance(value, list | tuple) else value


def _words(written: str, count: int) -> list[str]:
    """Words that are not in a text, and of which none is in another."""
    number = 0
    while f"WORD{number}X" in written:
        number += 1
    return [f"WORD{number}X{i}END" for i in range(count)]
