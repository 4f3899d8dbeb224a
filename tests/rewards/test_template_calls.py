"""Tool calls in the formats of Mistral, GLM, Qwen3.5, DeepSeek and GPT-OSS: read as they are meant, or not at all.

`tests/agents/test_random_conversations.py` reads what templates render, back into what was rendered.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from megatron_rl.rewards import make_reward
from megatron_rl.rewards.tool_parsers import APART, ParserName, read_calls

LOOK: Any = {"name": "look", "parameters": {"what": "lamp", "n": 1}}
GO: Any = {"name": "go", "parameters": {}}
JSON = '{"what": "lamp", "n": 1}'
GLM_LOOK = (
    "<tool_call>look\n<arg_key>what</arg_key>\n<arg_value>lamp</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n"
    "</tool_call>"
)
QWEN_ARGUMENTS = "<parameter=what>\nlamp\n</parameter>\n<parameter=n>\n1\n</parameter>"
QWEN_LOOK = f"<tool_call>\n<function=look>\n{QWEN_ARGUMENTS}\n</function>\n</tool_call>"
QWEN_GO = "<tool_call>\n<function=go>\n</function>\n</tool_call>"
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V3_LOOK, V3_GO = (
    f"{CALL}function{SEP}{name}\n```json\n{text}\n```{END}" for name, text in (("look", JSON), ("go", "{}"))
)
BEGIN, FINISH = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
COMMENTARY = "<|channel|>commentary"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
GPT_LOOK = f" to=functions.look{COMMENTARY} json<|message|>{JSON}"

READ: dict[ParserName, list[tuple[str, str, Any]]] = {  # text, what is beside the calls, calls
    "mistral": [
        ("It is 3.", "It is 3.", []),
        ('[TOOL_CALLS] [{"name": "look", "arguments": ' + JSON + ', "id": "abcdefghi"}]', "", [LOOK]),
        (
            'So.[TOOL_CALLS][{"name": "look", "arguments": ' + JSON + '}, {"name": "go", "arguments": {}}]',
            "So.",
            [LOOK, GO],
        ),
        (f"[TOOL_CALLS]look[ARGS]{JSON}[TOOL_CALLS]go[CALL_ID]abcdefghi[ARGS]{{}}</s>", "", [LOOK, GO]),
        ('[{"name": "go", "arguments": {}}]', "", [GO]),  # decoded without special tokens
        ("[1] is a footnote.", "[1] is a footnote.", []),
        ("[TOOL_CALLS]", "", None),
        ("[TOOL_CALLS][]", "", None),
        ("[TOOL_CALLS][3]", "", None),
        ('[TOOL_CALLS][{"name": "look", "arguments": {"what": ', "", None),
        ("[TOOL_CALLS]look[ARGS]3", "", None),
        (f"[TOOL_CALLS][ARGS]{JSON}", "", None),
        ("[TOOL_CALLS]look[ARGS]{}[TOOL_CALLS]go", "", None),
    ],
    "glm4": [
        ("It is 3.", "It is 3.", []),
        (f"So.\n{GLM_LOOK}\n<tool_call>go\n</tool_call>", "So.\n\n", [LOOK, GO]),
        (f"<think>{GLM_LOOK}</think>\nIt is 3.", "\nIt is 3.", []),
        ("<tool_call>go\n", "", None),
        ("</tool_call>", "", None),
        (f"<tool_call>{GLM_LOOK}</tool_call>", "", None),
        ("<tool_call></tool_call>", "", None),
        ("<tool_call>look\n<arg_key>what</arg_key></tool_call>", "", None),
        ("<tool_call>look\n<arg_value>lamp</arg_value></tool_call>", "", None),
        (f"<tool_call>{JSON}</tool_call>", "", None),
        (GLM_LOOK.replace("<arg_key>n<", "<arg_key>what<"), "", None),  # one argument twice
    ],
    "qwen3_5": [
        ("It is 3.", "It is 3.", []),
        (f"So.\n\n{QWEN_LOOK}\n{QWEN_GO}", "So.\n\n\n", [LOOK, GO]),
        (f"<think>\n{QWEN_GO}\n</think>\n\n{QWEN_LOOK}", "\n\n", [LOOK]),
        (QWEN_GO.removesuffix("</tool_call>"), "", None),
        (QWEN_GO.replace("</function>", ""), "", None),
        (QWEN_GO.replace("=go", ""), "", None),
        (QWEN_LOOK.replace("</parameter>\n</function>", "</function>"), "", None),
        (QWEN_LOOK.replace("=n>", "=what>"), "", None),
        (QWEN_LOOK.replace("\n1", "\n1\n</parameter> and more"), "", None),
        ('<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>', "", None),
    ],
    "deepseek": [
        ("It is 3.", "It is 3.", []),
        (f"So.{BEGIN}{V3_LOOK}\n{V3_GO}{FINISH}", "So.", [LOOK, GO]),
        (f"{BEGIN}{V3_GO}", "", [GO]),  # as V3's published template ends a single call
        (
            f"</think>{BEGIN}{CALL}look{SEP}{JSON}{END}{CALL}go{SEP}{{}}{END}{FINISH}<｜end▁of▁sentence｜>",
            "",
            [LOOK, GO],
        ),
        (BEGIN, "", None),
        (f"{BEGIN}{FINISH}", "", None),
        (f"{BEGIN}{V3_GO.removesuffix(END)}{FINISH}", "", None),
        (f"{BEGIN}{V3_GO}{FINISH} and more", "", None),
        (f"{BEGIN}so{V3_GO}{FINISH}", "", None),
        (f"{V3_GO}{FINISH}", V3_GO + FINISH, None),
        (f"{BEGIN}{CALL}function{SEP}go\n```json\n{{\n```{END}{FINISH}", "", None),
        (f"{BEGIN}{CALL}go{END}{FINISH}", "", None),
    ],
    "gpt_oss": [
        ("It is 3.", "It is 3.", []),
        (f"{THOUGHT}<|channel|>final<|message|>It is 3.", "It is 3.", []),
        (f"{THOUGHT}{GPT_LOOK}<|call|>", "", [LOOK]),
        (f"{COMMENTARY} to=functions.look <|constrain|>json<|message|>{JSON}", "", [LOOK]),
        (f"{COMMENTARY} to=functions.look<|message|>{JSON}", "", [LOOK]),
        (f"{COMMENTARY}<|message|>I look.<|end|><|start|>assistant{GPT_LOOK}", "I look.", [LOOK]),
        ("<|channel|>analysis to=functions.go code<|message|>{}<|call|>", "", [GO]),
        ("<|channel|>final", "<|channel|>final", None),
        ("<|message|>3", "<|message|>3", None),
        ("<|channel|>aside<|message|>3", "<|channel|>aside<|message|>3", None),
        (f" to=browser.search{COMMENTARY}<|message|>{{}}", f" to=browser.search{COMMENTARY}<|message|>{{}}", None),
        (GPT_LOOK.replace("}", ""), GPT_LOOK.replace("}", ""), None),
        (
            f"{COMMENTARY}<|message|>3{COMMENTARY}<|message|>3",
            f"{COMMENTARY}<|message|>3{COMMENTARY}<|message|>3",
            None,
        ),
    ],
}
CASES = [(parser, *case) for parser, cases in READ.items() for case in cases]


@pytest.mark.parametrize(("parser", "text", "beside", "calls"), CASES)
def test_a_turn_is_read_as_it_is_meant_or_not_at_all(parser: ParserName, text: str, beside: str, calls: Any) -> None:
    assert read_calls(text, parser) == calls
    if calls is not None:
        assert APART[parser](text.rpartition("</think>")[2])[0] == beside


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("glm4", f"<tool_call>look{'<arg_key>n</arg_key><arg_value>1</arg_value>' * 2000}and more</tool_call>"),
        ("qwen3_5", QWEN_LOOK.replace(QWEN_ARGUMENTS, QWEN_ARGUMENTS * 2000).replace("</function>", "")),
        ("gpt_oss", f"{COMMENTARY}{' ' * 20_000}!<|message|>{JSON}"),
        ("gpt_oss", f"{COMMENTARY} to={'a' * 20_000}!<|message|>{JSON}"),
    ],
    ids=lambda value: value[:10],
)
def test_a_long_call_that_breaks_off_is_seen_at_once(parser: ParserName, text: str) -> None:
    start = time.process_time()
    assert read_calls(text, parser) is None
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", 1),
        ({"anyOf": [{"type": "string"}, {}]}, "1", 1),
        ({"type": "integer"}, "1", 1),
        ({"type": "boolean"}, "True", True),  # as Qwen3.5's template writes it
        ({"type": "array"}, '["1"]', ["1"]),
        ({"type": "integer"}, "one", "one"),
        ({}, "1", 1),
        ({}, "lamp", "lamp"),
        (None, "None", None),
    ],
)
def test_the_schema_says_which_arguments_are_text(schema: Any, text: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"what": schema}}}}]
    glm = f"<tool_call>look\n<arg_key>what</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    qwen = f"<tool_call>\n<function=look>\n<parameter=what>\n{text}\n</parameter>\n</function>\n</tool_call>"
    formats: list[tuple[ParserName, str]] = [("glm4", glm), ("qwen3_5", qwen)]
    for parser, written in formats:
        assert read_calls(written, parser, tools) == [{"name": "look", "parameters": {"what": value}}]
        exact = make_reward("tool_exec", parser=parser)
        gold: Any = {"tool_calls": [{"name": "look", "parameters": {"what": value}}], "metadata": {"tools": tools}}
        assert exact(written, gold) == 1.0


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("mistral", f"[TOOL_CALLS]look[ARGS]{JSON}"),
        ("glm4", GLM_LOOK),
        ("qwen3_5", QWEN_LOOK),
        ("deepseek", BEGIN + V3_LOOK + FINISH),
        ("gpt_oss", GPT_LOOK),
    ],
)
def test_the_fields_that_are_wanted_and_no_others(parser: str, call: str) -> None:
    said, both = "So.\n", f"So.\n{call}"
    if parser == "gpt_oss":
        said = "<|channel|>final<|message|>So."
        both = f"{said}<|end|><|start|>assistant{call}"
    for text, has in ((call, (True, False)), (said, (False, True)), (both, (True, True))):
        for calls, response in ((True, False), (False, True), (True, True)):
            sample: Any = {"tool_calls": [LOOK] if calls else [], "needs_response": response}
            assert make_reward("tool_format", parser=parser, think="none")(text, sample) == (has == (calls, response))
