"""Reference rationales for a data set: every row once, resumable, within budget."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from .chat_server import serving

spec = importlib.util.spec_from_file_location(
    "write_rationales", Path(__file__).parents[2] / "tools/write_rationales.py"
)
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)
main = tool.main

ROWS = [
    {"prompt": f"question {i // 2}", "tool_calls": [{"name": "f", "parameters": {"i": i // 2}}], "id": i, "é": "ü"}
    for i in range(20)
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(data: Path, url: str, *options: str) -> int:
    arguments = ["--data", str(data), "--out", str(data.parent / "out.jsonl"), "--url", url, "--model", "m"]
    return main([*arguments, "--retries", "1", "--max-in-flight", "4", *options])


def written(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data.parent / "out.jsonl").open(encoding="utf-8")]


def echo(_: int, body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    return f"text:<think>hm</think> because of {content.split('question ')[1].split()[0]}"


EXPECTED = [{**row, "rationale": f"because of {row['id'] // 2}"} for row in ROWS]  # type: ignore[operator]


def test_every_row_gets_one_and_equal_prompts_are_asked_once(data: Path) -> None:
    with serving(echo) as server:
        assert run(data, server.url) == 0
        assert len(server.requests) == 10
    assert written(data) == EXPECTED
    assert not (data.parent / "out.jsonl.partial").exists()


def test_what_failed_is_asked_again_and_nothing_else(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def behave(number: int, body: dict[str, Any]) -> str:
        content = body["messages"][-1]["content"]
        return "status:500" if "question 3" in content or "question 4" in content else echo(number, body)

    with serving(behave) as server:
        assert run(data, server.url) == 1
    assert "4 rows have no rationale" in capsys.readouterr().err
    assert not (data.parent / "out.jsonl").exists()
    with (data.parent / "out.jsonl.partial").open("a") as file:
        file.write('{"key": "torn')
    with serving(echo) as server:
        assert run(data, server.url, "--max-requests", "1") == 1  # its answer must not be lost in the unfinished line
        assert run(data, server.url) == 0
        assert len(server.requests) == 2
    assert written(data) == EXPECTED


def test_the_budget_ends_it_and_the_next_call_goes_on(data: Path) -> None:
    with serving(echo) as server:
        assert run(data, server.url, "--max-requests", "4") == 1
        assert len(server.requests) == 4
        assert run(data, server.url, "--max-tokens", "300", "--max-in-flight", "1") == 1  # 107 tokens each
        assert len(server.requests) == 7
        assert run(data, server.url, "--keep-missing", "--max-requests", "1") == 1
        assert sum("rationale" in row for row in written(data)) == 16
        assert run(data, server.url) == 0
        assert len(server.requests) == 10
    assert written(data) == EXPECTED


def test_what_was_cut_off_is_no_rationale_and_any_character_survives(data: Path, capsys: Any) -> None:
    said = "one\u2028line \ud83d"
    ends = iter(["length", "stop"])

    def behave(number: int, body: dict[str, Any]) -> str:
        content = body["messages"][-1]["content"]
        if "question 3" not in content and "question 4" not in content:
            return echo(number, body)
        end = next(ends) if "question 3" in content else "stop"
        return "raw:" + json.dumps({"choices": [{"message": {"content": said}, "finish_reason": end}]})

    with serving(behave) as server:
        assert run(data, server.url) == 1
        assert "1 without: the reply was cut off" in capsys.readouterr().err
        assert run(data, server.url) == 0
        assert len(server.requests) == 11  # the one that was cut off is asked again, the one with a separator is not
    assert [row["rationale"] for row in written(data) if row["id"] in (6, 8)] == ["one\u2028line ?"] * 2


def test_a_dry_run_shows_a_prompt_and_asks_nothing(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(data), "--out", "x", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "question 0" in shown
    assert '{"name": "f", "parameters": {"i": 0}}' in shown
    assert "20 rows. Nothing was asked." in shown


def test_parquet_and_other_column_names(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    tagged = '<tool_call>\n{"name": "h", "parameters": {}}\n</tool_call>'
    rows = [
        {"q": "question 5", "calls": json.dumps([{"name": "g", "parameters": {}}])},
        {"q": "question 6", "calls": tagged},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    with serving(echo) as server:
        options = ("--prompt-column", "q", "--calls-column", "calls", "--column", "why")
        assert run(tmp_path / "d.parquet", server.url, *options) == 0
        asked = "".join(body["messages"][-1]["content"] for _, body, _ in server.requests)
        assert '{"name": "g", "parameters": {}}' in asked
        assert '\n{"name": "h", "parameters": {}}\n</right_tool_calls>' in asked  # not the tags around it
    assert [row["why"] for row in written(tmp_path / "d.parquet")] == ["because of 5", "because of 6"]


def test_a_wrong_column_or_a_wrong_model_says_so(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving("status:404") as server:
        assert run(data, server.url, "--prompt-column", "promt") == 2
        assert "--prompt-column" in capsys.readouterr().err
        assert run(data, server.url) == 2
        assert "HTTP 404" in capsys.readouterr().err
