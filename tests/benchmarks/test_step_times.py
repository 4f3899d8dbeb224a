"""The step benchmark's reading of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step import main, read_rows, step_times


def row(step: int, generate: float, update: float, sync: float, total: float, **more: float) -> dict[str, Any]:
    times = {"generate": generate, "update": update, "sync": sync, "step": total, **more}
    return {"step": step, **{f"timing_s/{name}": seconds for name, seconds in times.items()}}


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


def test_medians_over_the_last_half() -> None:
    start = [row(1, 90.0, 5.0, 5.0, 100.0), row(2, 90.0, 5.0, 5.0, 100.0)]  # first steps are slow in another way
    steady = [row(3, 1.0, 0.5, 0.2, 2.0, old_log_prob=0.1), row(4, 2.0, 1.0, 0.4, 4.0, old_log_prob=0.2)]
    times = step_times([*start, *steady])
    assert times.steps == (3, 4)
    assert times.seconds == pytest.approx(3.0)
    assert times.generation == pytest.approx(0.5)
    assert times.compute == pytest.approx(0.3)
    assert times.rest == pytest.approx(0.2)
    assert times.phases["sync"] == pytest.approx((0.3, 0.1))
    assert times.phases["(between phases)"] == pytest.approx((0.3, 0.1))
    assert next(iter(times.phases)) == "generate"


def test_a_single_step_and_a_phase_of_some_steps_only() -> None:
    assert step_times([row(1, 1.0, 1.0, 0.0, 2.0)]).rest == pytest.approx(0.0)
    rows = [row(1, 1.0, 1.0, 0.0, 2.0), row(2, 1.0, 1.0, 0.0, 4.0, ref_log_prob=2.0), row(3, 1.0, 1.0, 0.0, 2.0)]
    assert step_times(rows).compute == pytest.approx((0.75 + 0.5) / 2)


def test_only_rl_steps_are_read(tmp_path: Path) -> None:
    evaluation = {"step": 0, "eval/t/avg@1": 0.5}
    sft = {"step": 10, "sft/loss": 1.0, "timing_s/update": 0.1, "timing_s/step": 0.1}
    write(tmp_path, [evaluation, sft, row(1, 1.0, 1.0, 0.0, 2.0)])
    assert [each["step"] for each in read_rows(tmp_path)] == [1]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_rows(tmp_path)
    write(tmp_path, [{"step": 0, "eval/t/avg@1": 0.5}])
    assert main(["--run", str(tmp_path)]) == 2
    assert "no timed RL step" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    with pytest.raises(ValueError, match="line 1"):
        read_rows(tmp_path)


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [row(1, 1.0, 0.9, 0.1, 2.0)])
    assert main(["--run", str(tmp_path)]) == 0
    assert "rest at most 15% of a step: met" in capsys.readouterr().out
    write(tmp_path, [row(1, 1.0, 0.5, 0.5, 2.0)])
    assert main(["--run", str(tmp_path)]) == 0
    assert "missed" in capsys.readouterr().out
