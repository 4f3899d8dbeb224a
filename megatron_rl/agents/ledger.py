"""A rollout's tokens: what the model was given and what it drew, as a tree of turns.

A conversation that goes on is appended to. One that asks again, or from an earlier turn, parts there; one that begins with
other messages (another agent's, a summary in the place of what was said) is a root of its own. Each leaf is a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from megatron_rl.agents.chat_messages import difference, read_messages, same_tools
from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.turn_tree import TurnNode, TurnRequest
from megatron_rl.base.messages import errors_named
from megatron_rl.data.rollout import Segment
from megatron_rl.data.sample import Message, Sample
from megatron_rl.tasks.tokenizing import Tools, as_chat

_REMEDY = (
    "send what was sent before with the model's answers, and new messages behind; a rollout may have other conversations, "
    "shortened histories and second answers to the same messages as sequences of their own: agent.sequences says how many"
)


class LedgerError(ValueError):
    """A request that this conversation cannot go on with. The message is for the agent's author."""


class OtherPrompt(LedgerError):
    """The first request is not the sample's prompt."""


class Forked(LedgerError):
    """A request that does not continue a conversation, where the rollout may have only one."""


class TooManySequences(LedgerError):
    """A request that needs a sequence more than the rollout may have."""


class Ledger:
    """The tokens and messages of a rollout's conversations.

    Args:
        sample: of a chat; its prompt is the first request, and its `prompt_ids` are that request's tokens.
        sequences: the most that the rollout may have.
        renders: what the chat template writes of a history otherwise than it was given and drawn is a root of its own.
        of_experts: of a token's entry in the experts that answers come with; None: they come without.
    """

    def __init__(
        self,
        renderer: Renderer,
        sample: Sample,
        sequences: int = 1,
        renders: bool = False,
        of_experts: np.dtype | None = None,
    ) -> None:
        self._renderer, self._sequences, self._renders, self._of_experts = renderer, sequences, renders, of_experts
        self._tools = cast(Tools, sample.metadata.get("tools"))
        self._has_images = sample.images is not None
        prompt = read_messages(as_chat(sample.prompt))
        self._roots = [TurnNode(None, np.asarray(sample.prompt_ids, dtype=np.int64), prompt, self._tools, (0,))]
        self._last = self._roots[0]  # the last recorded turn; before it, the prompt
        self._pending: TurnRequest | None = None
        self._used = 0  # tokens of all sequences, without the first one's prompt
        self.turns = 0  # of all sequences

    def request(self, messages: Sequence[Mapping[str, object]], tools: Tools) -> list[int]:
        """Tokens to continue: all that are recorded before it, and those of the messages that are new.

        It goes on from the turn that has most of its messages, of several such turns the last. The same messages again,
        before they have an answer, are the same request.

        Raises:
            OtherPrompt: the first request is not the sample's prompt with its tools.
            Forked: the rollout has one sequence, and this does not begin with what is recorded.
            TooManySequences: it needs one more than the rollout may have.
            LedgerError: it adds nothing that the model may answer, the chat template or the tokenizer refuses what is new, or
                that is more than text.
        """
        with errors_named("", as_error=LedgerError):
            sent = read_messages(messages)
        if self.turns == 0:
            self._check_prompt(sent, tools)
            self._pending = TurnRequest(self._roots[0], [], [], False)
        elif self._sequences == 1:
            if self._pending is None or not self._repeats(sent):
                self._pending = self._following(self._last, self._added(sent, tools))
        else:
            self._pending = self._parted(sent, tools)
        return [*self._pending.parent.ids, *self._pending.given]

    def request_tokens(self, tokens: Sequence[int]) -> list[int]:
        """These tokens, which are all up to the last recorded turn, and new ones behind. The new ones' text is a message of
        the user's.

        Raises:
            OtherPrompt: the first request is not the sample's prompt.
            Forked: a later one does not begin with what is recorded, or adds nothing.
        """
        waiting = self._pending
        recorded = (waiting.parent if waiting else self._last).ids
        known = recorded + (waiting.given if waiting else [])
        if [*tokens[: len(known)]] != known:
            pairs = enumerate(zip(tokens, known, strict=False))
            places = (f"token_ids[{i}] is {theirs}, and was {ours}" for i, (theirs, ours) in pairs if theirs != ours)
            where = next(places, f"it has {len(tokens)} tokens, and there are {len(known)}")
            raise (Forked if self.turns else OtherPrompt)(f"the request does not go on with the sequence: {where}")
        new = [*tokens[len(known) :]]
        if unknown := [token for token in new if not 0 <= token < self._renderer.tokens]:
            raise LedgerError(f"token_ids has {unknown[0]}, and the tokenizer's are 0 to {self._renderer.tokens - 1}")
        if waiting is not None:
            if new:
                raise Forked(f"a request came while another had no answer: it has {len(new)} tokens more")
        elif self.turns == 0:
            if new:
                raise OtherPrompt(
                    f"the first request has {len(new)} tokens behind the sample's prompt; send the prompt"
                )
            self._pending = waiting = TurnRequest(self._last, [], [], False)
        elif not new:
            raise Forked("the request has no token behind the model's last turn")
        else:
            said: Message = {"role": "user", "content": self._renderer.tokenizer.decode(new)}
            self._pending = waiting = TurnRequest(self._last, new, [said], False)
        return recorded + waiting.given

    def count(self, messages: Sequence[Mapping[str, object]], tools: Tools) -> int:
        """Tokens of messages as the template writes them, whatever is recorded."""
        with errors_named("", as_error=LedgerError):
            tools = self._tools if same_tools(tools, self._tools) else tools
            return len(self._renderer.first(read_messages(messages), tools))

    @property
    def routed(self) -> int:
        """Tokens of the pending request whose experts are known: all before it, but for the parent's last, of which nothing
        was computed when it was drawn."""
        assert self._pending is not None
        return self._pending.parent.routed

    def record(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        version: int,
        finish_reason: str,
        message: Message,
        experts: np.ndarray | None = None,
    ) -> None:
        """The answer to the request: drawn tokens, the log-prob of each (None: unknown), and the message made of them.
        `experts`: of the tokens behind those that are `routed`, up to the last that was drawn."""
        if self._pending is None:
            raise ValueError("there is no request to record an answer to")
        values = np.full(len(ids), np.nan) if logprobs is None else np.asarray(logprobs)
        if len(values) != len(ids):
            raise ValueError(f"{len(ids)} tokens were drawn, and {len(values)} have a log-prob")
        request, self._used = self._pending, self._used + self._cost(self._pending) + len(ids)
        if request.is_root:
            self._roots.append(request.parent)
        parent = request.parent
        self._last = TurnNode(
            parent,
            np.asarray(request.given, dtype=np.int64),
            [*request.messages, *read_messages([message])],
            parent.tools,
            self.place,
            Segment(np.asarray(ids, dtype=np.int64), values.astype(np.float32), version),
            int(ids[-1]) if len(ids) and finish_reason != "length" else None,
            finish_reason == "length",
        )
        if experts is not None:
            self._last.take_experts(experts)
        parent.answers.append(self._last)
        self._pending, self.turns = None, self.turns + 1

    @property
    def segments(self) -> list[Segment]:
        """Returns what the model was given (no log-probs) and drew, turn by turn, sequence by sequence. A turn that several
        sequences share is drawn in the first of them, and given in the others, as what begins them. A request that has no
        answer is not among them."""
        if not self.turns:
            return [Segment(self._roots[0].given)]
        segments, seen = list[Segment](), set[int]()
        for leaf in self._leaves:
            shared = [part.ids for node in leaf.path if id(node) in seen for part in node.parts]
            new = [node for node in leaf.path if id(node) not in seen]
            seen |= {id(node) for node in new}
            parts = [part for node in new for part in node.parts if len(part.ids) or part.logprobs is not None]
            if segments:
                while parts and parts[0].logprobs is None:
                    shared.append(parts.pop(0).ids)
                segments.append(Segment(np.concatenate(shared), begins_sequence=True))
            segments += parts
        return segments

    @property
    def experts(self) -> np.ndarray | None:
        """`Rollout.experts`, of the tokens of `segments`: those that a token went to when it was first computed."""
        if self._of_experts is None:
            return None
        if not self.turns:
            return np.zeros(len(self._roots[0].given), self._of_experts)
        nodes = [node for leaf in self._leaves for node in leaf.path]
        return np.concatenate([node.known_experts for node in nodes])

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the last recorded turn; before it, the prompt."""
        return self._last.history

    @property
    def conversations(self) -> list[list[Message]]:
        """The conversation of each sequence, in the order of `segments`."""
        return [leaf.history for leaf in self._leaves]

    @property
    def is_cut(self) -> bool:
        """Whether the last turn of a sequence was cut."""
        return any(leaf.is_cut for leaf in self._leaves)

    @property
    def place(self) -> tuple[int, ...]:
        """Where the pending request's answer is in the tree: the number of its root, and of the answers down to it. All
        are 0 in a conversation that only goes on."""
        assert self._pending is not None
        parent = self._pending.parent
        return *parent.place, len(parent.answers)

    def room(self, limit: int) -> int:
        """Tokens that may still be drawn where all sequences may have `limit` without the first one's prompt."""
        return max(0, limit - self._used - (self._cost(self._pending) if self._pending else 0))

    # ------------------------------------------------------------------------------------------------------ the tree
    @property
    def _leaves(self) -> list[TurnNode]:
        """The last turns of the sequences: roots and answers in the order in which they were asked for."""
        leaves, open_ = list[TurnNode](), self._roots[::-1]
        while open_:
            node = open_.pop()
            open_ += node.answers[::-1]
            if not node.answers:
                leaves.append(node)
        return leaves

    def _is_new_sequence(self, request: TurnRequest) -> bool:
        """Whether the answer to it is not behind a leaf."""
        return bool(self.turns) and (request.is_root or bool(request.parent.answers))

    def _cost(self, request: TurnRequest) -> int:
        """Tokens that it adds to all sequences: a new one begins with a copy of what it shares."""
        return len(request.given) + (request.parent.size if self._is_new_sequence(request) else 0)

    def _parted(self, sent: list[Message], tools: Tools) -> TurnRequest:
        """The request, from the node that has most of its messages, or as a new root."""
        if not sent or sent[-1]["role"] == "assistant":
            raise LedgerError("the request has no message behind the model's last turn; send one that it may answer")
        node = max(self._matching(sent, tools), key=lambda found: (found[1], found[2]), default=None)
        if node is None:
            request = self._root(sent, tools)
        else:
            parent, count, _ = node
            rewritten = self._renders and parent.drawn is not None and self._is_rewritten(parent, sent, count)
            request = self._root(sent, tools) if rewritten else self._following(parent, sent[count:])
        if self._is_new_sequence(request) and len(self._leaves) >= self._sequences:
            raise TooManySequences(f"the rollout has had its {self._sequences} sequences")
        if self._is_new_sequence(request) and self._has_images:
            raise Forked("the prompt has images, and a rollout about it has one sequence yet; go on with what was said")
        return request

    def _matching(self, sent: list[Message], tools: Tools) -> Iterator[tuple[TurnNode, int, int]]:
        """Yields nodes that a request goes on from, how many of its messages each has, and their order."""
        open_, number = [(root, 0) for root in self._roots if same_tools(tools, root.tools)], 0
        while open_:
            node, begin = open_.pop(0)
            end, number = begin + len(node.messages), number + 1
            if len(sent) < end or _first_difference(sent[begin:end], node.messages) is not None:
                continue
            open_ += [(answer, end) for answer in node.answers]
            if node.drawn is not None or end == len(sent):
                yield node, end, number

    def _is_rewritten(self, parent: TurnNode, sent: list[Message], count: int) -> bool:
        """Whether the template writes the whole history in another text than it has where it goes on behind a node, which has
        `count` of its messages."""
        with errors_named("", as_error=LedgerError):
            whole = self._renderer.whole(sent, parent.tools)
        decode = self._renderer.tokenizer.decode
        written = str(decode(whole))
        if not written.startswith(str(decode(parent.ids))):
            return True  # whatever would be appended
        return written != decode([*parent.ids, *self._following(parent, sent[count:]).given])

    def _following(self, parent: TurnNode, new: list[Message]) -> TurnRequest:
        for i, message in enumerate(new, len(parent.history)):
            if not isinstance(message["content"], str):
                raise LedgerError(f"messages[{i}] has more than text; only a prompt may have images yet")
        given = list[int]()
        if parent.drawn is not None:
            history = parent.history
            with errors_named("", as_error=LedgerError):
                given = self._renderer.following([*history, *new], len(history), parent.tools, parent.ended)
        return TurnRequest(parent, given, new, False)

    def _root(self, sent: list[Message], tools: Tools) -> TurnRequest:
        for i, message in enumerate(sent):
            if not isinstance(message["content"], str):
                raise LedgerError(f"messages[{i}] has more than text; only a prompt may have images yet")
        with errors_named("", as_error=LedgerError):
            ids = self._renderer.whole(sent, tools)
        root = TurnNode(None, np.asarray(ids, dtype=np.int64), sent, tools, (len(self._roots),))
        return TurnRequest(root, [], [], True)

    # ------------------------------------------------------------------------------------------------------ one sequence
    def _check_prompt(self, sent: Sequence[Message], tools: Tools) -> None:
        prompt = self._roots[0].messages
        if (where := _first_difference(sent, prompt)) is not None:
            raise OtherPrompt(
                f"the first request is not the sample's prompt: {where}; send `task.prompt` as it is, and write what an "
                "agent adds (a system prompt, say) into the task's prompts"
            )
        if len(sent) > len(prompt):
            raise OtherPrompt(
                f"the first request has {len(sent)} messages, and the sample's prompt {len(prompt)}; send "
                "`task.prompt` as it is"
            )
        if not same_tools(tools, self._tools):
            raise OtherPrompt(
                f"the first request has the tools {_names(tools)}, and the sample {_names(self._tools)}, or describes them "
                "otherwise; send `task.tools`, and give the task's prompts the tools of the agent"
            )

    def _repeats(self, sent: Sequence[Message]) -> bool:
        """True: the request is the pending one. Raises Forked where it is another."""
        assert self._pending is not None
        pending = [*self._pending.parent.history, *self._pending.messages]
        where = _first_difference(sent, pending)
        if where is None and len(sent) == len(pending):
            return True
        said = where or f"it has {len(sent)} messages, and the other {len(pending)}"
        raise Forked(f"a request came while another had no answer: {said}; await one answer before the next request")

    def _added(self, sent: Sequence[Message], tools: Tools) -> list[Message]:
        """The messages behind those that are recorded."""
        recorded = self.messages
        if (where := _first_difference(sent, recorded)) is not None:
            raise Forked(f"the request does not go on with the conversation: {where}; {_REMEDY}")
        if not same_tools(tools, self._tools):
            raise Forked(f"the tools are not those of the first request ({_names(self._tools)}); send them with each")
        new = list(sent[len(recorded) :])
        if not new:
            raise Forked(f"the request has no message behind the model's last turn; {_REMEDY}")
        for i, message in enumerate(new, len(recorded)):
            if message["role"] == "assistant":
                raise Forked(f"messages[{i}] is the assistant's, and the model did not write it; {_REMEDY}")
        return new


def _first_difference(sent: Sequence[Message], recorded: Sequence[Message]) -> str | None:
    """Where messages do not begin with the recorded ones, in words; None where they do."""
    for i, (theirs, ours) in enumerate(zip(sent, recorded, strict=False)):
        if (said := difference(theirs, ours)) is not None:
            return f"messages[{i}]: {said}"
    if len(sent) < len(recorded):
        return f"it has {len(sent)} messages, and there are {len(recorded)}"
    return None


def _names(tools: Tools) -> str:
    functions = [tool.get("function", tool) for tool in tools or ()]
    names = [function.get("name") if isinstance(function, Mapping) else function for function in functions]
    return ", ".join(map(str, names)) or "none"
