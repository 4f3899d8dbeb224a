"""Prompts from JSONL files: columns, chat messages, tool calls, demonstrations, and files that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.schema import ColumnsConfig, TaskConfig, TasksConfig
from megatron_rl.tasks import load_task, load_tasks

Write = Callable[..., str]


@pytest.fixture
def jsonl(tmp_path: Path) -> Write:
    def write(*rows: Any) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), "utf-8")
        return str(path)

    return write


def task(path: str, **keys: Any) -> TaskConfig:
    return TaskConfig(source="jsonl", path=path, **keys)


def test_columns_become_fields_of_the_sample(jsonl: Write, printable: PreTrainedTokenizerFast) -> None:
    call = {"name": "add", "parameters": {"x": 1}}
    path = jsonl(
        {"prompt": "one", "answer": "1", "level": 3, "metadata": {"unit": "cm"}},
        "\n",
        {"prompt": "two", "tool_calls": [call], "needs_response": True},
    )
    one, two = load_task("file", task(path), printable)
    assert (one.id, one.prompt, one.answer, one.metadata) == ("file/0", "one", "1", {"level": 3, "unit": "cm"})
    assert (two.id, two.answer, two.tool_calls, two.needs_response) == ("file/1", None, [call], True)


def test_named_columns_template_size_and_demonstrations(jsonl: Write, printable: PreTrainedTokenizerFast) -> None:
    rows = [
        {"problem": f"{i}+{i}", "solution": str(2 * i), "hint": "{easy}", "text": f"it is {2 * i}"} for i in range(5)
    ]
    config = task(
        jsonl(*rows),
        columns=ColumnsConfig(prompt="problem", answer="solution"),
        prompt="{prompt}? ({hint}) {{}}",
        size=2,
        demonstrations="column:text",
    )
    samples = load_task("file", config, printable)
    assert [s.prompt for s in samples] == ["0+0? ({easy}) {}", "1+1? ({easy}) {}"]
    assert [s.answer for s in samples] == ["0", "2"]
    assert [s.demonstration for s in samples] == ["it is 0", "it is 2"]
    config.demonstrations = "column:solution"
    assert [s.demonstration for s in load_task("file", config, printable)] == ["0", "2"]


def test_messages_go_through_the_chat_template(jsonl: Write, printable: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = jsonl({"prompt": messages})
    (s,) = load_task("file", task(path, chat=True), printable)
    assert s.prompt == messages
    assert printable.decode(s.prompt_ids) == "[system]s\n[user]u\n[assistant]"
    with pytest.raises(ValueError, match="chat messages: set chat: true"):
        load_task("file", task(path), printable)
    with pytest.raises(ValueError, match="remove `prompt`"):
        load_task("file", task(path, chat=True, prompt="Q: {prompt}"), printable)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "task file: it has no prompts"),
        (('{"prompt": "a"',), "line 1: not JSON"),
        (({"prompt": "a"}, "[1]\n"), "line 2: must be a JSON object, not list"),
        (({"question": "a"},), r"line 1: no column 'prompt' \(it has question\)"),
        (({"prompt": 7},), "line 1: 'prompt' must be text or a list of chat messages"),
        (({"prompt": []},), "line 1: 'prompt' must be text or a list of chat messages"),
        (({"prompt": ""},), "cannot encode the prompt ''"),
        (({"prompt": "a", "tool_calls": [{"name": "f"}]},), "line 1: a gold call must be"),
        (({"prompt": "a", "tool_calls": "f(x)"},), "line 1: 'tool_calls' must be calls as JSON"),
        (({"prompt": "a", "tool_calls": 3},), "line 1: 'tool_calls' must be a list"),
        (({"prompt": "a", "tool_calls": "[{]"},), "line 1: 'tool_calls' is not JSON"),
        (
            ({"prompt": "a", "tool_calls": "<tool_call>\nf(x)\n</tool_call>"},),
            "line 1: 'tool_calls': .* cannot be read",
        ),
        (({"prompt": "a", "tools": "f"},), "line 1: 'tools' is not JSON"),
        (({"prompt": "a", "tools": [1]},), "line 1: 'tools' must be a list of JSON schemas"),
        (({"prompt": "a", "needs_response": 1},), "line 1: 'needs_response' must be true or false"),
        (({"prompt": "a", "metadata": [1]},), "line 1: the column 'metadata' must be an object"),
        (({"prompt": "\u00e9"},), "cannot encode"),
    ],
)
def test_bad_rows_are_named(
    rows: tuple[Any, ...], message: str, jsonl: Write, printable: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=message):
        load_task("file", task(jsonl(*rows)), printable)


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path, printable: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "with a byte order mark"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"task file: .*rows\.jsonl, line 2: not JSON \('utf-8' codec"):
        load_task("file", task(str(path)), printable)


def test_an_eval_prompt_is_excluded_whatever_the_order_of_its_keys(
    tmp_path: Path, printable: PreTrainedTokenizerFast
) -> None:
    rows = {"train": '{"role": "user", "content": "a"}', "test": '{"content": "a", "role": "user"}'}
    for name, message in rows.items():
        other = '{"prompt": [{"role": "user", "content": "b"}]}\n' if name == "train" else ""
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": [{message}]}}\n{other}')
    configs = {name: task(str(tmp_path / f"{name}.jsonl"), chat=True) for name in rows}
    configs["train"].exclude = ["test"]
    loaded = load_tasks(TasksConfig(train={"train": configs["train"]}, eval={"test": configs["test"]}), printable)
    assert [sample.id for sample in loaded.train] == ["train/1"]


def test_a_missing_file(printable: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"task file: cannot read /nowhere/x\.jsonl: No such file"):
        load_task("file", task("/nowhere/x.jsonl"), printable)


def test_a_demonstration_that_is_no_text(jsonl: Write, printable: PreTrainedTokenizerFast) -> None:
    config = task(jsonl({"prompt": "a", "answer": 7}), demonstrations="column:answer")
    with pytest.raises(ValueError, match=r"demonstration of file/0: the column 'answer' must hold .* not 7"):
        load_task("file", config, printable)
