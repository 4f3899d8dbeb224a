"""Tool-calling datasets as dialogues: ToolACE, xLAM, Hammer's masking, OpenAI-style messages, ToolRL's own rows, API-Bank."""

from __future__ import annotations

import ast
import json
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator

from megatron_rl.data.sample import Call
from megatron_rl.rewards.tool_parsers import as_call, parse_tool_calls
from megatron_rl.tasks.row_mapping import column, gold_calls
from megatron_rl.tasks.rows import Row, prune
from public_data.dialogue import SYSTEM, Dialogue, Dropped, ToolSchema, Turn, decisions

_FIELDS = re.compile(r"</?(tool_call|response)>")
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


class Unreadable(ValueError):
    """A row that is not in its format; the message is the reason for dropping it."""


def tool_rows(
    row: Row, read: Callable[[Row], Dialogue], style: str = "toolrl", system: str = SYSTEM, mask_seed: int | None = None
) -> Iterable[Row | Dropped]:
    """The decisions in one row of a dataset."""
    try:
        dialogue = read(row)
    except Unreadable as error:
        return [Dropped(str(error))]
    if mask_seed is not None:
        known = json.dumps(row, sort_keys=True, default=str)
        dialogue = mask(dialogue, random.Random(f"mask, seed {mask_seed}, {known}"))
    return decisions(dialogue, style, system)


# ------------------------------------------------------------------------------------------------------------ readers
def read_xlam(row: Row) -> Dialogue:
    """xLAM: `query`, `tools` and `answers`, the latter two as JSON text; no answers: no tool serves the query."""
    query = row.get("query")
    if not isinstance(query, str) or not query.strip():
        raise Unreadable("no query")
    tools = read_tools(row.get("tools"))
    answers = _json(row.get("answers"), "answers")
    calls = _calls(answers if isinstance(answers, list) else None)
    turn = Turn("assistant", calls=calls) if calls else Turn("assistant", text="None of the tools can do this.")
    return Dialogue(tools, [Turn("user", query.strip()), turn])


def read_toolace(row: Row) -> Dialogue:
    """ToolACE: `system` with the tools as a JSON list, `conversations` with calls as `[name(key=value), ...]`."""
    system, said = row.get("system"), row.get("conversations")
    if not isinstance(system, str) or not isinstance(said, list):
        raise Unreadable("no system or conversations")
    tools = read_tools(_first_list(system))
    names = [tool.name for tool in tools]
    turns = []
    for message in said:
        role, value = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
        if role not in ("user", "assistant", "tool") or not isinstance(value, str):
            raise Unreadable("a turn of an unknown kind")
        if role != "assistant":
            turns.append(Turn(role, value.strip()))
            continue
        calls = read_call_list(value, names)
        if calls is None and looks_like_calls(value):
            raise Unreadable("calls that cannot be read")
        turns.append(Turn(role, calls=calls) if calls is not None else Turn(role, text=value.strip()))
    return Dialogue(tools, turns)


def read_messages(row: Row) -> Dialogue:
    """OpenAI's format: `messages` (with `tool_calls`, role `tool`) and `tools`, either as JSON text or not."""
    messages = _json(row.get("messages"), "messages")
    if not isinstance(messages, list):
        raise Unreadable("no messages")
    turns = []
    for message in prune(messages):
        if not isinstance(message, dict):
            raise Unreadable("a turn of an unknown kind")
        role, content = message.get("role"), message.get("content")
        if role == "system":
            continue  # the prompt has its own system message
        if role not in ("user", "assistant", "tool") or not (content is None or isinstance(content, str)):
            raise Unreadable("a turn of an unknown kind")
        try:
            calls = gold_calls(message.get("tool_calls"), "tool_calls") or []
        except ValueError:
            raise Unreadable("calls that cannot be read") from None
        thought = message.get("reasoning_content")
        turns.append(Turn(role, content, calls, thought if isinstance(thought, str) else None))
    return Dialogue(read_tools(row.get("tools", [])), turns)


# ----------------------------------------------------------------------------------------- rows with a prompt already
def toolrl_rows(row: Row) -> list[Row | Dropped]:
    """ToolRL's own rows: the prompt as it is, the gold calls and the reasoning from the tagged output.

    `instruction`, `input`, `output` (the fine-tuning file), or `prompt` and `reward_model.ground_truth` (the RL files).
    Some reasoning mentions the tags, so `tool_format` would find them twice: in the reasoning they lose their brackets.
    """
    if isinstance(row.get("instruction"), str) and isinstance(row.get("input"), str):
        prompt: object = [{"role": "system", "content": row["instruction"]}, {"role": "user", "content": row["input"]}]
        output = row.get("output")
    else:
        prompt, output = row.get("prompt"), column(row, "reward_model.ground_truth")
    if not prompt or not isinstance(output, str):
        return [Dropped("no prompt or output")]
    calls = parse_tool_calls(output) if "<tool_call>" in output else []
    if calls is None:
        return [Dropped("calls that cannot be read")]
    thinking, closed, rest = output.rpartition("</think>")
    output = _FIELDS.sub(r"\1", thinking) + closed + rest
    response = _between(rest, "response")
    thought = _between(output, "think")
    made: Row = {
        "prompt": prompt,
        "tool_calls": calls,
        "needs_response": response is not None,
        "answer": response,
        "metadata": {"rationale": thought} if thought else {},
        "demonstration": output,
    }
    return [made]


def api_bank_rows(row: Row) -> list[Row | Dropped]:
    """API-Bank in ToolRL's prompt format: `system`, `user`, and `answer`, a call or a list of calls."""
    answer = row.get("answer")
    try:
        calls = _calls([answer] if isinstance(answer, dict) else answer)
    except Unreadable as error:
        return [Dropped(str(error))]
    if not isinstance(row.get("system"), str) or not isinstance(row.get("user"), str) or not calls:
        return [Dropped("no system, user or answer")]
    prompt = _two_messages(row["system"], row["user"])
    return [{"prompt": prompt, "tool_calls": calls, "needs_response": False, "metadata": {"other": row.get("other")}}]


def _two_messages(system: object, user: object) -> object:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _between(text: str, tag: str) -> str | None:
    _, opened, rest = text.partition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside.strip() if opened and closed else None


# ------------------------------------------------------------------------------------------------- tools and calls
def read_tools(value: object) -> list[ToolSchema]:
    """Tools from a list (or its JSON text) of schemas: OpenAI's, ToolACE's, or xLAM's flat parameters."""
    tools = []
    listed = _json(value, "tools")
    if not isinstance(listed, list):
        raise Unreadable("tools that cannot be read")
    for item in listed:
        if isinstance(item, dict) and isinstance(item.get("function"), dict):
            item = item["function"]
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise Unreadable("tools that cannot be read")
        parameters = item.get("parameters") or {}
        required = item.get("required") or []
        if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
            required = parameters.get("required") or required
            parameters = parameters["properties"]
        if not isinstance(parameters, dict) or not isinstance(required, list):
            raise Unreadable("tools that cannot be read")
        description = str(item.get("description") or "")
        tools.append(ToolSchema(item["name"], description, parameters, tuple(map(str, required))))
    return tools


def _calls(value: object) -> list[Call]:
    if not isinstance(value, list):
        raise Unreadable("calls that cannot be read")
    calls = []
    for item in value:
        call = as_call(item, ("arguments", "parameters"))
        if call is None:
            raise Unreadable("calls that cannot be read")
        calls.append(call)
    return calls


def _json(value: object, what: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Unreadable(f"{what} that cannot be read") from None


def _first_list(text: str) -> object:
    """The first JSON list of objects in a text."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\[\s*\{", text):
        try:
            return decoder.raw_decode(text, match.start())[0]
        except (ValueError, RecursionError):
            continue
    raise Unreadable("tools that cannot be read")


def looks_like_calls(text: str) -> bool:
    return re.match(r"\s*\[[^\[\]{}\n]{1,100}\(", text) is not None and text.rstrip().endswith("]")


def read_call_list(text: str, names: list[str]) -> list[Call] | None:
    """`[name(key=value, ...), ...]` with Python's or JSON's values; None where it is not that.

    Names are looked up among the tools, since they may contain blanks and brackets.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    rest = text[1:-1].strip()
    calls: list[Call] = []
    while rest:
        name = max((name for name in names if rest.startswith(name + "(")), key=len, default=None)
        if name is None:
            match = re.match(r"[\w. /-]+(?=\()", rest)
            if match is None:
                return None
            name = match[0]
        end = _closing(rest, len(name))
        if end is None:
            return None
        parameters = _keywords(rest[len(name) + 1 : end])
        if parameters is None:
            return None
        calls.append({"name": name.strip(), "parameters": parameters})
        rest = rest[end + 1 :].lstrip()
        if rest.startswith(","):
            rest = rest[1:].lstrip()
        elif rest:
            return None
    return calls or None


def _unquoted(text: str, start: int = 0) -> Iterator[tuple[int, str, int]]:
    """Place, character, and depth of brackets after it, for every character outside quotes from `start` on."""
    depth, quote, at = 0, "", start
    while at < len(text):
        character = text[at]
        if quote:
            if character == "\\":
                at += 1
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
            yield at, character, depth
        at += 1


def _closing(text: str, start: int) -> int | None:
    """Place of the bracket that closes the one at `start`, outside quotes; None where none does."""
    found = (at for at, character, depth in _unquoted(text, start) if character in ")]}" and depth == 0)
    return next(found, None)


def _keywords(text: str) -> dict[str, object] | None:
    """The values of `key=value, key=value`; keys may hold anything but `=` and `,`."""
    values: dict[str, object] = {}
    rest = text.strip()
    while rest:
        key, equals, rest = rest.partition("=")
        end = _comma(rest)
        try:
            values[key.strip()] = _value(rest[:end].strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        if not equals or not key.strip() or "," in key:
            return None
        rest = rest[end + 1 :].strip()
    return values


def _comma(text: str) -> int:
    """Place of the first comma outside quotes and brackets; the text's length without one."""
    return next((at for at, character, depth in _unquoted(text) if character == "," and depth == 0), len(text))


def _value(text: str) -> object:
    """A value as JSON or Python writes it."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    except TypeError as error:  # what JSON cannot hold
        raise ValueError(str(error)) from None


# --------------------------------------------------------------------------------------------------- Hammer's masking
def mask(dialogue: Dialogue, rng: random.Random) -> Dialogue:
    """Function and parameter names replaced by random ones, so that only descriptions tell what they do (Hammer).

    A parameter that several tools share gets another name in each; the calls are renamed too.
    """
    names: dict[str, str] = {}
    keys: dict[str, dict[str, str]] = {}
    tools = []
    for tool in dialogue.tools:
        name = names[tool.name] = _random_name(rng)
        renamed = keys[tool.name] = {key: _random_name(rng) for key in tool.parameters}
        parameters = {renamed[key]: value for key, value in tool.parameters.items()}
        required = tuple(renamed.get(key, key) for key in tool.required)
        tools.append(ToolSchema(name, tool.description, parameters, required))

    def rename(call: Call) -> Call:
        known = keys.get(call["name"], {})
        parameters = {known.get(key, key): value for key, value in call["parameters"].items()}
        return {"name": names.get(call["name"], call["name"]), "parameters": parameters}

    turns = [Turn(t.role, t.text, [rename(call) for call in t.calls], t.thought) for t in dialogue.turns]
    return Dialogue(tools, turns)


def _random_name(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(4, 10)))
