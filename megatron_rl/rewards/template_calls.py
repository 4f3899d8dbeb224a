"""Reading tool calls as the chat templates of Mistral, GLM, Qwen3.5, DeepSeek and GPT-OSS have them written.

- `mistral`: `[TOOL_CALLS]` and a list of `{"name": ..., "arguments": {...}, "id": ...}`; or, since version 11 of its
  tokenizers, `[TOOL_CALLS]name[ARGS]{...}` once per call, with `[CALL_ID]...` before `[ARGS]` or not.
- `glm4` (GLM-4.5 and 4.6): `<tool_call>name`, per argument `<arg_key>...</arg_key>` and `<arg_value>...</arg_value>`,
  `</tool_call>`.
- `qwen3_5` (also Qwen3-Coder): `<tool_call>`, `<function=name>`, `<parameter=key>`, the value, `</parameter>` per argument,
  `</function>`, `</tool_call>`.
- `deepseek` (V3, R1, V3.1): within `<｜tool▁calls▁begin｜>` and its end, per call `<｜tool▁call▁begin｜>`, `function`,
  `<｜tool▁sep｜>`, the name, the arguments as a block of JSON, `<｜tool▁call▁end｜>`; or name, `<｜tool▁sep｜>`, JSON.
- `gpt_oss` (harmony): messages on channels; one to `functions.name` is a call, whose content is its arguments.

Each takes what was said after the thinking, without the token that ended the turn, and returns the text beside the calls and
the calls, which are None where they cannot be read. vLLM's own parsers want a server's request, and drop what they cannot
read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from megatron_rl.data.sample import Call
from megatron_rl.rewards.call_json import as_call, load_json

Apart = tuple[str, list[Call] | None]
Tools = Sequence[Mapping[str, object]]

# ------------------------------------------------------------------------------------------------------------- Mistral
_TOOL_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_STARTS_LIST = re.compile(r"\s*\[\s*\{")


def mistral_apart(message: str) -> Apart:
    """`[TOOL_CALLS]` is a special token: where completions are decoded without those, a message that begins with a list of
    objects is calls."""
    message = message.removesuffix("</s>")
    if _TOOL_CALLS not in message:
        return ("", _listed(message)) if _STARTS_LIST.match(message) else (message, [])
    text, *pieces = message.split(_TOOL_CALLS)
    if len(pieces) == 1 and _ARGS not in pieces[0]:
        return text, _listed(pieces[0])
    calls = list[Call]()
    for piece in pieces:
        name, parted, arguments = piece.partition(_ARGS)
        name, value = name.partition(_CALL_ID)[0].strip(), load_json(arguments)
        if not (name and parted and isinstance(value, dict)):
            return text, None
        calls.append({"name": name, "parameters": value})
    return text, calls


def mistral_ids(message: str) -> list[str]:
    """The ids that a message gives its calls, in order; [] where one has none that Mistral's templates take."""
    _, *pieces = message.split(_TOOL_CALLS)
    if any(_ARGS in piece for piece in pieces):
        ids: list[object] = [piece.partition(_ARGS)[0].partition(_CALL_ID)[2].strip() for piece in pieces]
    else:
        values = load_json(pieces[0] if pieces else message)
        ids = [value.get("id") for value in values] if isinstance(values, list) else []
    taken = [i for i in ids if isinstance(i, str) and _ID.fullmatch(i)]
    return taken if len({*taken}) == len(ids) else []


def _listed(text: str) -> list[Call] | None:
    values = load_json(text)
    if not isinstance(values, list) or not values:
        return None
    calls = [as_call(value, ("arguments", "parameters")) for value in values]
    return None if None in calls else cast(list[Call], calls)


# -------------------------------------------------------------------------------------------------- GLM-4.5 and Qwen3.5
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# An argument ends at its first closing tag (atomic): a text of many would else be cut in every combination.
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_GLM_CALL = re.compile(rf"\s*([^\s<>]+)\s*((?>{_ARGUMENT.pattern})*+)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_QWEN_CALL = re.compile(rf"\s*<function=([^>\s]+)>\s*((?>{_PARAMETER.pattern})*+)</function>\s*", re.DOTALL)


def glm4_apart(said: str) -> Apart:
    """Arguments are texts: see `typed`."""
    return _tagged_apart(said, _GLM_CALL, _ARGUMENT)


def qwen3_5_apart(said: str) -> Apart:
    """Arguments are texts: see `typed`."""
    return _tagged_apart(said, _QWEN_CALL, _PARAMETER)


def _tagged_apart(said: str, call: re.Pattern[str], argument: re.Pattern[str]) -> Apart:
    text, *blocks = said.split(_OPEN)
    if _CLOSE in text:
        return text, None
    calls, beside = list[Call](), [text]
    for block in blocks:
        body, closed, rest = block.partition(_CLOSE)
        call_match = call.fullmatch(body)
        if not closed or _CLOSE in rest or call_match is None:
            return text, None
        arguments: list[tuple[str, str]] = argument.findall(call_match[2])
        parameters = dict[str, object](arguments)
        if len(parameters) < len(arguments):
            return text, None
        calls.append({"name": call_match[1], "parameters": parameters})
        beside.append(rest)
    return "".join(beside), calls


_WRITTEN_IN_PYTHON: dict[str, object] = {
    "True": True,
    "False": False,
    "None": None,
}  # Qwen3.5's template writes these so


def typed(call: Call, tools: Tools | None) -> Call:
    """A call whose arguments are texts, with their values: JSON where the text is JSON. A text stays one where the schema of
    the call's tool says that it is."""
    schemas = next((_schemas(tool) for tool in tools or () if _function(tool).get("name") == call["name"]), {})
    values = {key: _value(str(text), schemas.get(key)) for key, text in call["parameters"].items()}
    return {"name": call["name"], "parameters": values}


def _value(text: str, schema: object) -> object:
    if (types := _types(schema)) and types <= {"string", "null"}:
        return None if "null" in types and text in ("null", "None") else text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _WRITTEN_IN_PYTHON.get(text, text)


def _types(schema: object) -> set[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types = [_types(option) for option in schema[key]]
            return set[str]().union(*types) if all(types) else set()
    kinds = schema.get("type", ())
    return {kinds} if isinstance(kinds, str) else {str(kind) for kind in kinds}


def _function(tool: Mapping[str, object]) -> Mapping[str, object]:
    return cast(Mapping[str, object], tool.get("function", tool))


def _schemas(tool: Mapping[str, object]) -> Mapping[str, object]:
    parameters = _function(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


# ------------------------------------------------------------------------------------------------------------ DeepSeek
def _token(name: str) -> str:
    return f"<｜{name.replace(' ', '▁')}｜>"


_CALLS, _CALLS_END = _token("tool calls begin"), _token("tool calls end")
_CALL, _SEP, _CALL_END = _token("tool call begin"), _token("tool sep"), _token("tool call end")
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)


def deepseek_apart(said: str) -> Apart:
    """Whoever ends the turn behind its last call has ended the calls: V3's published template does it."""
    text, begun, rest = said.removesuffix(_token("end of sentence")).partition(_CALLS)
    if not begun:
        return (text, None) if _CALL in text or _CALLS_END in text else (text, [])
    body, _, behind = rest.partition(_CALLS_END)
    before, *blocks = body.split(_CALL)
    if before.strip() or behind.strip() or not blocks:
        return text, None
    calls = list[Call]()
    for block in blocks:
        inner, ended, between = block.partition(_CALL_END)
        kind, parted, called = inner.partition(_SEP)
        fenced = _FENCED.fullmatch(called)
        name, arguments = (fenced[1], fenced[2]) if fenced is not None else (kind, called)
        value = load_json(arguments)
        if not (ended and parted and name.strip() and isinstance(value, dict)) or between.strip():
            return text, None
        calls.append({"name": name.strip(), "parameters": value})
    return text, calls


# ------------------------------------------------------------------------------------------------------------- GPT-OSS
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER = re.compile(
    r"(?:assistant)?(?:\s*to=(?P<to>[^\s<]+))?\s*<\|channel\|>\s*(?P<channel>analysis|commentary|final)"
    r"(?:\s*to=(?P<then_to>[^\s<]++))?\s*+(?:(?:<\|constrain\|>\s*)?\w+\s*)?"
)
_FUNCTIONS = "functions."


class Harmony(NamedTuple):
    """A turn of GPT-OSS."""

    thinking: str | None  # of the channel `analysis`; None: it has none
    text: str  # of the others, less calls
    calls: list[Call] | None


def read_harmony(turn: str) -> Harmony:
    """A turn's messages by channel; what is none of harmony's is text. The turn begins behind the prompt's
    `<|start|>assistant`."""
    if not any(token in turn for token in (_CHANNEL, _MESSAGE, _START)):
        return Harmony(None, turn, [])
    thoughts, texts, calls = list[str](), list[str](), list[Call]()
    for header, body in _harmony_messages(turn):
        found = _HEADER.fullmatch(header)
        if found is None or body is None:
            return Harmony(None, turn, None)
        to = found["to"] or found["then_to"]
        if to is None:
            (thoughts if found["channel"] == "analysis" else texts).append(body)
            continue
        value = load_json(body)
        if not to.startswith(_FUNCTIONS) or to == _FUNCTIONS or not isinstance(value, dict):
            return Harmony(None, turn, None)
        calls.append({"name": to.removeprefix(_FUNCTIONS), "parameters": value})
    return Harmony("\n".join(thoughts) if thoughts else None, "\n".join(texts), calls)


def _harmony_messages(turn: str) -> Iterator[tuple[str, str | None]]:
    """Headers and contents; None: a message that has none, or whose content has a token of harmony's."""
    for piece in turn.split(_START):
        header, parted, body = piece.partition(_MESSAGE)
        body = next((body.removesuffix(end) for end in _ENDS if body.endswith(end)), body)
        broken = not parted or any(token in body for token in (_CHANNEL, _MESSAGE, *_ENDS))
        yield header, None if broken else body


def gpt_oss_apart(said: str) -> Apart:
    _, text, calls = read_harmony(said)
    return text, calls
