"""tools/prepare_data.py: small rows in the form of the public datasets, what becomes of them, what is dropped and counted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import prepare_data
import pytest
from public_data.tools import read_call_list

from megatron_rl.config.schema import ColumnsConfig
from megatron_rl.rewards import make_reward
from megatron_rl.tasks.row_mapping import to_item

TOOLS = [
    {
        "name": "Get Score (live)",
        "description": "The score of a match.",
        "parameters": {
            "type": "dict",
            "properties": {"team": {"type": "string"}, "year": {"type": "int"}},
            "required": ["team"],
        },
    },
    {"name": "news", "description": "The news.", "parameters": {"type": "dict", "properties": {}}},
]
TOOLACE = {
    "system": f"You know functions.\n{json.dumps(TOOLS)}\nOnly call what is listed.",
    "conversations": [
        {"from": "user", "value": "How did Ajax do?"},
        {"from": "assistant", "value": '[Get Score (live)(team="Ajax, the club", year=2020), news()]'},
        {"from": "tool", "value": '[{"score": "2:1"}]'},
        {"from": "assistant", "value": "They won 2:1."},
        {"from": "user", "value": "And PSV?"},
        {"from": "assistant", "value": "[scores(team='PSV')]"},
    ],
}
XLAM = {
    "query": "Is 17 prime, and 18?",
    "tools": json.dumps([{"name": "is_prime", "description": "d", "parameters": {"n": {"type": "int", "default": 2}}}]),
    "answers": json.dumps([{"name": "is_prime", "arguments": {"n": n}} for n in (17, 18)]),
}
MESSAGES = {
    "tools": [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {}}}}}
    ],
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Add 1, then 2."},
        {
            "role": "assistant",
            "content": "First 1.",
            "reasoning_content": "one comes first",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "1"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"x": 2}}}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ],
}
TOOLRL_OUTPUT = '<think> A <tool_call> is due. </think>\n<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>'
DAPO = (
    "Solve the following math problem step by step. The last line is Answer: $Answer.\n\nWhat is\n\n6 times 7?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def prepare(
    tmp_path: Path, name: str, rows: list[Any], *options: str, capsys: Any = None, status: int = 0
) -> list[dict[str, Any]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out" / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    assert prepare_data.main([name, "--input", str(source), "--output", str(target), *options]) == status
    made = [json.loads(line) for line in target.read_text("utf-8").splitlines()] if target.exists() else []
    assert not target.with_name("out.jsonl.partial").exists()
    return made


def gold_scores_most(row: dict[str, Any]) -> None:
    item = to_item(row, ColumnsConfig())
    sample = {"tool_calls": item.tool_calls, "needs_response": item.needs_response}
    for name, most in (("tool_format", 1.0), ("tool_correctness", 3.0), ("tool_exec", 1.0), ("tool_outcome", 2.0)):
        assert make_reward(name)(row["demonstration"], sample) == most, name


def test_toolace_turns_become_decisions_with_all_that_came_before(tmp_path: Path, capsys: Any) -> None:
    first, second = prepare(tmp_path, "toolace", [TOOLACE])
    said = capsys.readouterr().out
    assert "1 rows read, 2 written" in said
    assert "1 dropped: calls a tool that is not listed" in said
    assert first["tool_calls"] == [
        {"name": "Get Score (live)", "parameters": {"team": "Ajax, the club", "year": 2020}},
        {"name": "news", "parameters": {}},
    ]
    assert (first["needs_response"], second["needs_response"], second["answer"]) == (False, True, "They won 2:1.")
    system, user = first["prompt"]
    assert '1. Name: Get Score (live)\nDescription: The score of a match.\nParameters: {"team"' in system["content"]
    assert user["content"] == "**Dialogue Records History**\n<user> How did Ajax do? </user>"
    later = second["prompt"][1]["content"]
    assert later.startswith(user["content"])
    assert later.endswith('"parameters": {}}\n</tool_call>\n<obs> [{"score": "2:1"}] </obs>')
    for row in (first, second):
        gold_scores_most(row)


def test_xlam_and_what_no_tool_serves(tmp_path: Path) -> None:
    called, declined = prepare(tmp_path, "xlam", [XLAM, {**XLAM, "answers": "[]"}])
    assert called["tool_calls"] == [{"name": "is_prime", "parameters": {"n": n}} for n in (17, 18)]
    assert (declined["tool_calls"], declined["needs_response"]) == ([], True)
    gold_scores_most(called)
    gold_scores_most(declined)


def test_hammer_masks_names_and_keeps_descriptions(tmp_path: Path) -> None:
    (row,) = prepare(tmp_path, "hammer", [XLAM])
    again, other = (prepare(tmp_path, "hammer", [XLAM], "--seed", seed)[0] for seed in ("0", "1"))
    (call, _) = row["tool_calls"]
    ((key, value),) = call["parameters"].items()
    system = row["prompt"][0]["content"]
    assert value == 17
    assert f'Name: {call["name"]}\nDescription: d\nParameters: {{"{key}"' in system
    assert "is_prime" not in json.dumps(row)
    assert row == again
    assert row["tool_calls"] != other["tool_calls"]
    gold_scores_most(row)


def test_a_dialogue_of_k_steps_becomes_k_instances(tmp_path: Path) -> None:
    rows = prepare(tmp_path, "stepwise", [MESSAGES])
    assert [row["metadata"]["step"] for row in rows] == [1, 2, 3]
    histories = [row["prompt"][1]["content"] for row in rows]
    assert all(later.startswith(earlier) for earlier, later in pairwise(histories))
    assert [len(row["tool_calls"]) for row in rows] == [1, 1, 0]
    assert [row["needs_response"] for row in rows] == [True, False, True]
    assert rows[0]["metadata"]["rationale"] == "one comes first"
    for row in rows:
        gold_scores_most(row)


def test_chat_style_leaves_the_format_to_the_template(tmp_path: Path) -> None:
    rows = prepare(tmp_path, "stepwise", [MESSAGES], "--style", "chat")
    assert [[message["role"] for message in row["prompt"]] for row in rows] == [
        ["user"],
        ["user", "assistant", "tool"],
        ["user", "assistant", "tool", "assistant", "tool"],
    ]
    call = rows[1]["prompt"][1]["tool_calls"][0]["function"]
    assert call == {"name": "add", "arguments": {"x": 1}}
    assert to_item(rows[0], ColumnsConfig()).tools == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "",
                "parameters": {"type": "object", "properties": {"x": {}}, "required": []},
            },
        }
    ]


def test_toolrl_and_api_bank_rows_keep_their_prompts(tmp_path: Path) -> None:
    row = {"instruction": "s", "input": "u", "output": TOOLRL_OUTPUT}
    (made,) = prepare(tmp_path, "toolrl", [row])
    assert [message["content"] for message in made["prompt"]] == ["s", "u"]
    assert made["metadata"]["rationale"] == "A tool_call is due."
    gold_scores_most(made)
    call = {"name": "f", "parameters": {"a": 1}}
    rows = [{"system": "s", "user": "u", "answer": call}, {"system": "s", "user": "v", "answer": [call]}]
    assert [made["tool_calls"] for made in prepare(tmp_path, "api_bank", rows)] == [[call], [call]]


def test_a_benchmark_keeps_all_its_cases(tmp_path: Path) -> None:
    row = {"system": "s", "user": "u", "answer": {"name": "f", "parameters": {}}}
    assert len(prepare(tmp_path, "api_bank", [row, row])) == 2


def test_maths(tmp_path: Path) -> None:
    (row,) = prepare(
        tmp_path, "gsm8k", [{"question": "How many?", "answer": "2 * 600 = <<2*600=1200>>1,200\n#### 1,200"}]
    )
    assert (row["prompt"], row["answer"]) == ("How many?", "1200")
    dapo = {"prompt": [{"role": "user", "content": DAPO}], "reward_model": {"ground_truth": "42"}}
    (row,) = prepare(tmp_path, "dapo_math", [dapo, dapo])
    assert (row["prompt"], row["answer"]) == ("What is\n\n6 times 7?", "42")
    (row,) = prepare(tmp_path, "deepscaler", [{"problem": "p", "answer": 7, "solution": "s"}])
    assert (row["answer"], row["metadata"]) == ("7", {"solution": "s"})
    eurus = [
        {"prompt": [{"role": "user", "content": ability}], "ability": ability, "reward_model": {"ground_truth": "{}"}}
        for ability in ("math", "code")
    ]
    (row,) = prepare(tmp_path, "eurus", eurus, "--ability", "code")
    assert row["prompt"][0]["content"] == "code"


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("xlam", {**XLAM, "query": " "}, "no query"),
        ("xlam", {**XLAM, "tools": "["}, "tools that cannot be read"),
        ("xlam", {**XLAM, "answers": '[{"name": 1}]'}, "calls that cannot be read"),
        ("toolace", {"system": "none", "conversations": []}, "tools that cannot be read"),
        ("stepwise", {"messages": [{"role": "judge"}], "tools": []}, "a turn of an unknown kind"),
        ("stepwise", {"messages": ["hi"], "tools": []}, "a turn of an unknown kind"),
        ("toolace", {**TOOLACE, "conversations": [None]}, "a turn of an unknown kind"),
        ("stepwise", {"messages": [{"role": "assistant", "content": "hi"}], "tools": []}, "the assistant speaks first"),
        (
            "toolrl",
            {"instruction": "s", "input": "u", "output": "<tool_call>\n{\n</tool_call>"},
            "calls that cannot be read",
        ),
        ("gsm8k", {"question": "q", "answer": "7"}, "no final answer after ####"),
        ("toolrl", {"reward_model": "rule"}, "no prompt or output"),
        ("dapo_math", {"prompt": "q"}, "not one user message"),
        ("dapo_math", {"prompt": ["q"]}, "not one user message"),
        ("deepscaler", {"problem": "\ud83d", "answer": "1"}, "text that is no Unicode"),
        ("deepscaler", {"problem": "q", "answer": " "}, "no problem or answer"),
        ("eurus", {"prompt": [{}], "ability": "code"}, "its ability is code, not math"),
    ],
)
def test_what_is_dropped_is_counted_by_reason(
    name: str, row: dict[str, Any], reason: str, tmp_path: Path, capsys: Any
) -> None:
    assert prepare(tmp_path, name, [row, row], status=1) == []
    said = capsys.readouterr()
    assert f"2 dropped: {reason}\n" in said.out
    assert "nothing was written" in said.err


def test_duplicates_are_counted_or_kept(tmp_path: Path, capsys: Any) -> None:
    row = {"problem": "p", "answer": "1"}
    assert len(prepare(tmp_path, "deepscaler", [row, row, {**row, "answer": "2"}])) == 2
    assert "1 dropped: the same prompt and answer" in capsys.readouterr().out
    assert len(prepare(tmp_path, "deepscaler", [row, row], "--keep-duplicates")) == 2


def test_files_of_one_array_each_by_a_pattern(tmp_path: Path, capsys: Any) -> None:
    for number in (1, 2):
        (tmp_path / f"part{number}.json").write_text(json.dumps([{"problem": f"p{number}", "answer": "1"}]))
    command = ["deepscaler", "--output", str(tmp_path / "out.jsonl"), "--input"]
    assert prepare_data.main([*command, f"{tmp_path}/part*.json"]) == 0
    assert [json.loads(line)["prompt"] for line in (tmp_path / "out.jsonl").open()] == ["p1", "p2"]
    for bad in ("[" * 100_000, "{"):
        (tmp_path / "bad.json").write_text(bad)
        assert prepare_data.main([*command, f"{tmp_path}/bad.json"]) == 1
        assert f"prepare_data: {tmp_path}/bad.json is not JSON" in capsys.readouterr().err


def test_a_system_message_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_text('Tools: {tools}. Write {"name": ...}.')
    (row,) = prepare(tmp_path, "xlam", [XLAM], "--system", str(path))
    assert row["prompt"][0]["content"].startswith("Tools: 1. Name: is_prime\n")
    assert row["prompt"][0]["content"].endswith('. Write {"name": ...}.')
    path.write_text("Tools.")
    prepare(tmp_path, "xlam", [XLAM], "--system", str(path), status=1)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[a(x="1, 2", y=(1, [2]), z={"k": "]"})]', [("a", {"x": "1, 2", "y": [1, [2]], "z": {"k": "]"}})]),
        ("[a(x='it\\'s', y=true, z=None), b.c()]", [("a", {"x": "it's", "y": True, "z": None}), ("b.c", {})]),
        ("[a(user-id=-1.5)]", [("a", {"user-id": -1.5})]),
        ("[a(x=open('f'))]", None),
        ("[a(x=1) b()]", None),
        ("[a(x=1]", None),
        ("[1, 2]", None),
        ("[]", None),
        ("a(x=1)", None),
        ("[a(1)]", None),
        ("[a(x={1, 2})]", None),
    ],
)
def test_toolaces_calls(text: str, calls: Any) -> None:
    found = read_call_list(text, ["a"])
    assert found == (None if calls is None else [{"name": name, "parameters": values} for name, values in calls])


USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Hi?"), ("assistant", "Hello."), ("assistant", "No."))
)


@pytest.mark.parametrize(
    ("row", "written"),
    [
        ({"context_messages": [USER], "dataset": "x"}, {"prompt": [USER]}),
        ({"context_messages": [USER, GOOD, {**USER, "name": None}]}, {"prompt": [USER, GOOD, USER]}),
        ({"prompt": "Hi?"}, {"prompt": [USER]}),
        ({"context_messages": [USER, GOOD]}, "the last message is the assistant's"),
        ({"prompt": " "}, "no prompt"),
    ],
)
def test_prompts_of_a_collection(row: dict[str, Any], written: Any) -> None:
    [found] = prepare_data.FORMATS["prompts"](prepare_data.Options())(row)
    assert (found if isinstance(found, dict) else found.reason) == written


@pytest.mark.parametrize(
    ("chosen", "rejected", "written"),
    [
        ([USER, GOOD], [USER, BAD], {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}),
        (
            [USER, GOOD, USER, GOOD],
            [USER, GOOD, USER, BAD],
            {"prompt": [USER, GOOD, USER], "chosen": [GOOD], "rejected": [BAD]},
        ),
        ([USER, GOOD], [USER, GOOD], "chosen and rejected are the same, or one ends where the other goes on"),
        ([USER], [USER, GOOD], "chosen and rejected are the same, or one ends where the other goes on"),
        ([USER, GOOD], [BAD], "chosen and rejected share no prompt"),
        ("text", [BAD], "no chat messages in chosen and rejected"),
    ],
)
def test_preference_pairs_as_they_are_published(chosen: Any, rejected: Any, written: Any) -> None:
    row = {"chosen": chosen, "rejected": rejected, "score": 1.0}
    [found] = prepare_data.FORMATS["preferences"](prepare_data.Options())(row)
    assert (found if isinstance(found, dict) else found.reason) == written


def test_arena_hards_questions_meet_the_baselines_answers(tmp_path: Path) -> None:
    new = {"uid": "u1", "messages": [USER, {"role": "assistant", "content": {"answer": "New."}}]}
    old = {"question_id": "q1", "choices": [{"index": 0, "turns": [{"content": "Old."}]}]}
    (tmp_path / "baseline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (new, old)))
    questions = [
        {"uid": "u1", "category": "creative_writing", "prompt": "Write."},
        {"uid": "u2", "category": "creative_writing", "prompt": "Write more."},
        {"question_id": "q1", "category": "arena-hard-v0.1", "turns": [{"content": "Ask."}]},
        {"uid": "u3", "category": "creative_writing"},
    ]

    def found(category: str | None) -> list[Any]:
        options = prepare_data.Options(baseline=str(tmp_path / "baseline.jsonl"), category=category)
        convert = prepare_data.FORMATS["arena_hard"](options)
        rows = [row for question in questions for row in convert(question)]
        return [
            (r["prompt"][0]["content"], r["metadata"]["baseline"]) if isinstance(r, dict) else r.reason for r in rows
        ]

    none = "the baseline has no answer to it"
    assert found(None) == [("Write.", "New."), none, ("Ask.", "Old."), "no question"]
    assert found("creative_writing")[2] == "its category is arena-hard-v0.1, not creative_writing"
    with pytest.raises(ValueError, match="arena_hard needs --baseline FILE"):
        prepare_data.FORMATS["arena_hard"](prepare_data.Options())
    (tmp_path / "baseline.jsonl").write_text('{"uid": "u1"}\n')
    with pytest.raises(ValueError, match=r"baseline.jsonl, line 1: no answer"):
        found(None)
