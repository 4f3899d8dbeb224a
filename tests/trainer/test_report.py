"""What an earlier run left is moved once, by the rank that writes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.config import to_yaml
from megatron_rl.config.schema import Config, LoggingConfig
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation.samples import write_responses
from megatron_rl.runtime import disk
from megatron_rl.trainer.report import Reporter


def reporter(run_dir: Path, rank: int) -> Reporter:
    grid: Any = SimpleNamespace(is_main=rank == 0)
    return Reporter(Config(run_dir=str(run_dir), logging=LoggingConfig(tensorboard=False, report=False)), run_dir, grid)


def test_what_a_server_said_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "judge: no score in 'Sure. [/INST] [bold] [a, b]'"
    main = reporter(tmp_path, rank=0)
    main.warn(text)
    main.note(text)
    main.close()
    assert capsys.readouterr().out.count(text) == 2


def test_only_the_writing_rank_moves_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    other = reporter(tmp_path, rank=1)
    other.start_over()
    other.close()
    assert (tmp_path / "metrics.jsonl").exists()
    (tmp_path / "previous_2").mkdir()  # whose predecessor was removed to make room
    main = reporter(tmp_path, rank=0)
    main.start_over()
    main.close()
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "previous_3" / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_run_that_starts_over_is_another_run_for_its_trackers(tmp_path: Path) -> None:
    for name in ("wandb_id", "mlflow_id"):
        (tmp_path / name).write_text("old")
    main = reporter(tmp_path, rank=0)
    main.start_over()
    main.close()
    assert sorted(path.name for path in (tmp_path / "previous_1").iterdir()) == ["mlflow_id", "wandb_id"]


def test_half_a_surrogate_pair_in_data_ends_neither_training_nor_evaluation(tmp_path: Path) -> None:
    half = "half \ud83d of it"  # as JSON may hold it
    sample = Sample(id="t/0", task="t", prompt=[{"role": "user", "content": "q"}], prompt_ids=[1], answer=half)
    rollout = Rollout.single_turn(sample, 0, [1], "stop")
    rollout.text, rollout.rewards = half, {"right": 1.0}
    main = reporter(tmp_path, rank=0)
    main.samples(1, [sample], [rollout], torch.zeros(1), None, [{}])
    main.close()
    write_responses(tmp_path / "samples" / "t.jsonl", [sample], [rollout], ("right", 1.0))
    for name in ("step_1.jsonl", "t.jsonl"):
        row = json.loads((tmp_path / "samples" / name).read_text(encoding="utf-8"))
        assert (row["answer"], row["response"]) == (half, half)


def test_half_a_surrogate_pair_can_be_printed() -> None:
    code = (
        "from megatron_rl.runtime import streams\nstreams.accept_any_text()\n"
        "from rich.console import Console\nprint('a \\ud83d')\nConsole().print('b \\ud83d')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, "a \\ud83d\nb \\ud83d\n"), done.stderr


def rows(path: Path, *steps: int, **metrics: float) -> str:
    """Writes a metrics file; its text."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "".join(json.dumps({"step": step, **{k: v + step for k, v in metrics.items()}}) + "\n" for step in steps)
    )
    return path.read_text()


def test_what_a_continued_run_does_again_is_removed_and_what_came_before_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = rows(tmp_path / "metrics.jsonl", 0, 2, 4, **{"eval/sums/avg@1": 0.125})
    for name in (
        "samples/step_2.jsonl",
        "samples/step_4.jsonl",
        "samples/eval_sums_step_4.jsonl",
        "rollouts/step_10.npz",
        "rollouts/step_10.tokens/0.npz",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    main = reporter(tmp_path, rank=0)
    kept = text[: text.index('{"step": 4')]
    main.continue_from(2, metrics_bytes=len(kept))
    assert (tmp_path / "metrics.jsonl").read_text() == kept
    assert [path.name for path in [*tmp_path.glob("samples/*"), *tmp_path.glob("rollouts/*")]] == ["step_2.jsonl"]
    main.log(3, {"eval/sums/avg@1": 0.5, "eval/sums/response_length": 1.0})
    main.summary()
    main.close()
    said = capsys.readouterr().out
    assert "rows are missing" not in said
    assert "+0.375" in said, "from the evaluation before the first step, which another process has logged"


def test_a_continued_warm_up_keeps_its_rows_up_to_the_checkpoint_and_none_of_rl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = rows(tmp_path / "sft" / "metrics.jsonl", 10, 20, 30, **{"sft/loss": 1.0})
    rows(tmp_path / "metrics.jsonl", 0)
    main = reporter(tmp_path, rank=0)
    main.continue_from(20, metrics_bytes=len(text), warm_up=True)
    main.close()
    assert (tmp_path / "sft" / "metrics.jsonl").read_text() == text[: text.index('{"step": 30')]
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    said = capsys.readouterr().out
    assert f"sft/metrics.jsonl has {len(text) * 2 // 3} bytes up to step 20, {len(text)} were written" in said
    assert "continuing after step 20 of the warm-up" in said


def test_a_run_says_where_its_time_went_and_draws_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid: Any = SimpleNamespace(is_main=True)
    config = Config(run_dir=str(tmp_path), logging=LoggingConfig(tensorboard=False))
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    main = Reporter(config, tmp_path, grid)
    before = time.time()
    for step, seconds in ((1, 3.0), (2, 5.0)):
        main.log(step, {"timing_s/generate": seconds, "timing_s/update": 1.0, "reward/mean": 0.5})
    main.log(2, {"eval/sums/avg@1": 0.5, "eval/sums/response_length": 4.0, "eval/sums/pass@1": 1.0})
    main.summary()
    main.close()
    said = capsys.readouterr().out
    assert "eval sums at step 2: avg@1 0.500, length 4.0" in said
    assert said.count("eval sums") == 1
    assert "Time within RL steps: generate 80%, update 20%" in said
    assert all(before - 1 < row["time"] < time.time() + 1 for row in disk.json_lines(tmp_path / "metrics.jsonl"))
    assert "reward/mean" in (tmp_path / "report.html").read_text()
