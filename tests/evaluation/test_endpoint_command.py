"""Evaluations of a served model by the command, against a server that answers by a rule and misbehaves on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rewards import chat_server
from transformers import AutoTokenizer

from megatron_rl.cli import main
from megatron_rl.config import load_recipe
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.tasks.sources import items_of
from megatron_rl.tasks.tool_house import ToolHouse
from megatron_rl.weights.create import create_model

from .server import Rule, answer, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    create_model(folder, CreateModelConfig(), seed=0)
    (folder / "model.safetensors").unlink()  # an endpoint has the weights
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(1, 5)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "run_dir": str(tmp_path / "run"),
        "tasks": {"eval": {"sums": {"source": "jsonl", "path": str(tmp_path / "sums.jsonl")}}},
        "rewards": {"correct": {"reward": "format", "params": {"pattern": "[24]"}}},
        "rollout": {"max_prompt_tokens": 16, "max_tokens": 8},
        "evaluation": {"endpoint": {"retries": 0}},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


ONE_MAY_FAIL = "evaluation.endpoint.max_failed_share=0.25"


def double(model: Path) -> Rule:
    """Says the sum, as text in the model's tokens; fails for 3."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def rule(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        first = int(tokenizer.decode(request["prompt"])[0])
        return (
            (500, {})
            if first == 3
            else answer(request, tokenizer(str(2 * first), add_special_tokens=False)["input_ids"])
        )

    return rule


def test_failed_requests_are_shown_and_fail_the_command(
    model: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(double(model)) as server:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url]
        assert main(arguments) == 1
        shown = capsys.readouterr()
        assert "1 requests (25.0%) stayed unanswered" in shown.err
        assert "failed" in shown.out
        assert main([*arguments, ONE_MAY_FAIL]) == 0
    content = json.loads((recipe.parent / "run" / "evaluation.json").read_text())
    assert content["failed_requests"] == 1
    assert content["metrics"]["eval/sums/avg@1"]["value"] == pytest.approx(2 / 3), "8 is wrong; the lost one is not"
    assert content["model"]["served_name"] == "tiny"
    records = (recipe.parent / "run" / "samples" / "sums.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"] for line in records] == ["2", "4", "8"]
    assert (recipe.parent / "run" / "previous_1" / "evaluation.json").exists(), "an earlier evaluation is kept"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--endpoint", "http://127.0.0.1:9/v1"], "--model DIR"),
        (["--served-name", "tiny"], "without --endpoint"),
        (["--model", "nowhere"], "does not exist"),
        (["--model", "."], "neither a Hugging Face folder"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(
    arguments: list[str], match: str, recipe: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(recipe.parent)
    extra = [] if "--model" in arguments else ["model.create={}"]
    assert main(["evaluate", str(recipe), *arguments, *extra]) == 2
    assert match in capsys.readouterr().err
    assert not (recipe.parent / "run").exists()


def test_data_without_what_the_reward_needs_is_refused_before_anybody_is_asked(
    model: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(double(model)) as server:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url]
        assert main([*arguments, "rewards.correct.reward=puzzle", "rewards.correct.params={}"]) == 2
        assert not server.requests
    assert (
        "sums.jsonl, line 1: the reward 'correct' cannot score it: the puzzle reward needs" in capsys.readouterr().err
    )


def test_a_training_runs_folder_is_not_touched(model: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recipe.parent / "run"
    (run / "checkpoints").mkdir(parents=True)
    with serving(double(model)) as server:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url]
        assert main([*arguments, f"run_dir={run}"]) == 2
        assert "holds a training run" in capsys.readouterr().err
        main(arguments)
    assert {path.name for path in run.iterdir()} == {"checkpoints", "evaluation"}
    assert (run / "evaluation" / "endpoint" / "evaluation.json").exists()


def test_a_judge_is_asked_once_also_by_the_next_evaluation(model: Path, recipe: Path) -> None:
    def grade(number: int, body: dict[str, Any]) -> str:
        return f"score:{(0.25, 1.0, 0.5)[number]}"

    def last_row() -> dict[str, float]:
        return dict(json.loads((recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()[-1]))

    with serving(double(model)) as server, chat_server.serving(grade) as judge:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url, ONE_MAY_FAIL]
        arguments += ["rewards.judge.reward=judge"]
        arguments += ["rewards.judge.params.model=m", f"rewards.judge.params.urls={judge.url}"]
        assert main(arguments) == 0
        first = last_row()
        assert (first["judge/scored"], first["judge/cache_hits"], len(judge.requests)) == (3, 0, 3)
        samples = recipe.parent / "run" / "samples" / "sums.jsonl"
        grades = [json.loads(line)["rewards"]["judge"] for line in samples.read_text().splitlines()]
        assert sorted(grades) == [0.25, 0.5, 1.0]

        assert main(arguments) == 0
        again = last_row()
        assert (again["judge/scored"], again["judge/cache_hits"], len(judge.requests)) == (3, 3, 3)
        assert [json.loads(line)["rewards"]["judge"] for line in samples.read_text().splitlines()] == grades


def test_an_evaluation_that_was_killed_asks_only_for_what_is_missing(
    model: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, release = recipe.parent / "run", threading.Event()
    tokenizer = AutoTokenizer.from_pretrained(model)

    def by_seed(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        return answer(request, tokenizer(str(request["seed"] % 1000), add_special_tokens=False)["input_ids"])

    def some(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        if tokenizer.decode(request["prompt"])[0] in "34":
            release.wait(60)
        return by_seed(request, attempt)

    def command(url: str, *more: str) -> list[str]:
        sampled = ["trainer.eval_rollouts=3", "trainer.eval_temperature=1.0"]
        return ["evaluate", str(recipe), "--model", str(model), "--endpoint", url, *sampled, *more]

    def responses() -> list[str]:
        return (run / "samples" / "sums.jsonl").read_text().splitlines()

    with serving(by_seed) as server:
        assert main(command(server.url)) == 0
        expected = responses()
        assert len(expected) == len(server.requests) == 12
        assert not (run / "responses").exists()

    with serving(some) as server:
        process = subprocess.Popen([sys.executable, "-m", "megatron_rl", *command(server.url)])
        left = run / "responses" / "engine0.jsonl"
        deadline = time.monotonic() + 120
        while not left.exists() or left.read_text().count("\n") < 6:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
        release.set()
    assert not (run / "evaluation.json").exists()
    lines = left.read_text().splitlines()
    left.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # as a kill in the middle of a write leaves it
    saved, origin = left.read_text(), (left.parent / "origin.json").read_text()

    def again(*more: str) -> int:
        with serving(by_seed) as server:
            assert main(command(server.url, *more)) == 0
            return len(server.requests)

    assert again() == 7
    assert "continuing an interrupted evaluation: 5 responses" in capsys.readouterr().out
    assert responses() == expected
    assert not (run / "responses").exists()

    def leave() -> None:
        left.parent.mkdir()
        left.write_text(saved)
        (left.parent / "origin.json").write_text(origin)

    leave()
    data = recipe.parent / "sums.jsonl"
    data.write_text(data.read_text().replace("1+1=", "7+7="))
    assert again() == 12 - 5 + "".join(lines[:5]).count("sums/0")  # another prompt under a known name

    for change in ("trainer.eval_temperature=0.5", "seed=8", "rollout.max_tokens=7"):
        leave()
        assert again(change) == 12
        key = change.partition("=")[0]
        assert f"an interrupted evaluation is not continued, because of another {key}" in capsys.readouterr().out


HOUSE = Path(__file__).parents[2] / "recipes" / "cpu" / "tool_house.yaml"


def knows_the_house(folder: Path, fails: Callable[[str], bool]) -> Rule:
    """Converses as the demonstrations do: what was said before decides the turn. `fails`: what has no answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = load_recipe(HOUSE)
    said: dict[str, str] = {}
    for item in items_of(replace(config.tasks.eval["house_test"], size=3)):
        house = ToolHouse()
        house.reset({"metadata": item.metadata, "tools": item.tools})
        text = f"{item.prompt}\n>"
        for call in item.tool_calls or []:
            body = json.dumps({"name": call["name"], "arguments": call["parameters"]})
            said[text] = f"<tool_call>\n{body}\n</tool_call>"
            text += f"{said[text]}<eos>\n={house.call(call['name'], call['parameters'])}\n>"
        said[text] = str(item.answer)

    def rule(request: dict[str, Any], attempt: int) -> tuple[int, dict[str, Any]]:
        text = tokenizer.decode(request["prompt"])
        if fails(text):
            return 500, {}
        drawn = tokenizer(said[text], add_special_tokens=False)["input_ids"]
        return answer(request, [*drawn, tokenizer.eos_token_id])

    return rule


def test_conversations_with_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole tasks succeed; one that the server leaves is lost, and only it is held again by the same command."""
    created = load_recipe(HOUSE).model.create
    assert created is not None
    create_model(tmp_path / "model", created, seed=0)
    given = ["tasks.eval.house_test.size=3", f"run_dir={tmp_path / 'run'}", "evaluation.endpoint.retries=0"]
    given += ["trainer.eval_rollouts=2", "model.create=null"]

    def evaluated(fails: Callable[[str], bool]) -> tuple[int, int]:
        with serving(knows_the_house(tmp_path / "model", fails)) as server:
            arguments = ["evaluate", str(HOUSE), "--model", str(tmp_path / "model"), "--endpoint", server.url, *given]
            return main(arguments), len(server.requests)

    def left() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        rows = (tmp_path / "run" / "samples" / "house_test.jsonl").read_text().splitlines()
        return json.loads((tmp_path / "run" / "evaluation.json").read_text()), [json.loads(row) for row in rows]

    code, asked = evaluated(lambda text: False)
    content, whole = left()
    assert (code, content["metrics"]["eval/house_test/avg@2"]["value"]) == (0, 1.0)
    assert content["metrics"]["eval/house_test/pass@2"]["value"] == 1.0
    assert asked == sum(len(record["turn_tokens"]) for record in whole)
    assert all(record["rewards"] == {"success": 1.0, "steps": 1.0} for record in whole)

    turns = {record["sample"]: len(record["turn_tokens"]) for record in whole}
    lost, begins = whole[0]["sample"], f"{whole[0]['prompt']}\n>"
    fails = 2 * 2 * 2  # two rollouts, two attempts each, a turn and one without an answer
    assert evaluated(lambda text: text.startswith(begins) and text != begins) == (1, asked - 2 * turns[lost] + fails)
    content, rest = left()
    assert (content["failed_requests"], rest[2:]) == (2, whole[2:])
    assert [record.get("failed_by") for record in rest] == ["infrastructure"] * 2 + [None] * 4
    assert all(value is None for record in rest[:2] for value in record["rewards"].values())
    shown = capsys.readouterr()
    assert "2 conversations were lost" in shown.out
    assert "HTTP 500" in shown.out
    assert "2 requests (33.3%) stayed unanswered" in shown.err

    assert evaluated(lambda text: False) == (0, 2 * turns[lost])
    assert "continuing an interrupted evaluation: 4 responses" in capsys.readouterr().out
    content, again = left()
    assert (content["failed_requests"], again) == (0, whole)


WITHOUT_ENGINE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "vllm", "transformer_engine"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from megatron_rl.cli import main
from megatron_rl.config import load_recipe
sys.exit(main(sys.argv[1:]))
"""


def test_a_machine_without_megatron_and_vllm_can_ask_a_server(model: Path, recipe: Path) -> None:
    with serving(double(model)) as server:
        arguments = ["evaluate", str(recipe), "--model", str(model), "--endpoint", server.url, ONE_MAY_FAIL]
        command = [sys.executable, "-c", WITHOUT_ENGINE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (recipe.parent / "run" / "evaluation.json").exists()
