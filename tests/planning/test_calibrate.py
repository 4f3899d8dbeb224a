"""A run's times scale the prediction: of the same recipe they come out, of another layout they go along."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.cli import main
from megatron_rl.config import load_recipe
from megatron_rl.config.load import to_yaml

RECIPE = str(Path(__file__).parents[2] / "recipes" / "scale" / "qwen3-8b.yaml")
TIMES = {"generate": 400.0, "old_log_prob": 30.0, "update": 200.0, "sync": 3.0, "estimate": 2.0, "reward": 7.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(to_yaml(load_recipe(RECIPE)))
    lengths = {"prompt_length/mean": 100.0, "response_length/mean": 3000.0, "response_length/max": 8000.0}
    slow, usual = ({f"timing_s/{name}": factor * value for name, value in TIMES.items()} for factor in (9, 1))
    rows = [
        {**lengths, **times, "timing_s/step": 1.0, "step": i + 1} for i, times in enumerate([slow, slow, usual, usual])
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    for rank in range(16):
        (tmp_path / "logs" / "attempt_1" / f"rank_{rank}.log").touch()
    return tmp_path


def seconds(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    main(["plan", RECIPE, "--json", *arguments])
    found: dict[str, float] = json.loads(capsys.readouterr().out)["step_time"]["seconds"]
    return found


def test_the_runs_own_times_come_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = seconds(capsys, "--nodes", "2", "--calibrate", str(run))
    assert found == pytest.approx(TIMES | {"step": sum(TIMES.values())})
    fewer = seconds(capsys, "--nodes", "1", "--calibrate", str(run))
    assert fewer["update"] == pytest.approx(2 * TIMES["update"], rel=0.05)
    assert fewer["estimate"] == TIMES["estimate"]
    assert seconds(capsys, "--nodes", "2", "--calibrate", str(run), "--reward-seconds", "1")["reward"] == 1


def test_prompts_may_be_others_than_the_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, longer = (
        seconds(capsys, "--nodes", "2", "--calibrate", str(run), "--prompt-tokens", tokens)["update"]
        for tokens in ("100", "1000")
    )
    assert own == pytest.approx(TIMES["update"])
    assert longer > 1.2 * own


def test_what_the_run_guessed_is_in_its_times(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "recipe.yaml").write_text(to_yaml(load_recipe(RECIPE, ["rollout.speculation={tokens: 4, below: 100000}"])))
    rows = [json.loads(line) | {"rollouts/drafted_share_below": 0.25} for line in (run / "metrics.jsonl").open()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = "--nodes", "2", "--calibrate", str(run), "rollout.speculation={tokens: 4, below: 100000}"
    assert seconds(capsys, *given)["generate"] == pytest.approx(TIMES["generate"])
    more = seconds(capsys, *given, "--drafted-share", "0.5")["generate"]
    assert more == pytest.approx(TIMES["generate"] * 0.5 / 0.75, rel=0.03)  # but for reading prompts


def test_a_run_of_partial_rollouts_says_what_a_plain_step_takes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_recipe, way = "algorithm.resample_rounds=0", "rollout.partial.chunk_tokens=1024"
    (run / "recipe.yaml").write_text(to_yaml(load_recipe(RECIPE, [plain_recipe, way])))
    given = ("--nodes", "2", "--calibrate", str(run), plain_recipe)
    assert main(["plan", RECIPE, "--json", *given, way]) == 0
    found = json.loads(capsys.readouterr().out)["step_time"]
    assert found["seconds"]["generate"] == pytest.approx(TIMES["generate"])
    assert found["generation_share"] != 1
    plain = seconds(capsys, *given)["generate"]
    assert plain == pytest.approx(TIMES["generate"] / found["generation_share"])


def test_recorded_lengths_are_taken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rollouts").mkdir()
    np.savez(run / "rollouts" / "step_10.npz", lengths=np.full((4, 4), 2000.0))
    main(["plan", RECIPE, "--nodes", "2", "--calibrate", str(run)])
    assert "prompts of 100 and responses of 2,000 in the mean, the longest about 2,000" in capsys.readouterr().out


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, "--calibrate", str(tmp_path)]) == 2
    assert "it needs recipe.yaml, metrics.jsonl and logs" in capsys.readouterr().err


def test_a_run_on_other_hardware_is_doubted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ("plan", RECIPE, "--nodes", "2", "--calibrate", str(run))
    main([*nodes])
    told = capsys.readouterr().out
    assert "the run's times, as multiples of their prediction: generate " in told
    assert "did not run on" not in told
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "timing_s/update": 1e5}) + "\n" for row in rows))
    main([*nodes])
    assert "did not run on h100, and of another recipe this predicts nothing" in capsys.readouterr().out
