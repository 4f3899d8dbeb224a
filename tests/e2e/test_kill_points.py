"""Promise 3 at its worst points: in the warm-up, in the update, while a checkpoint is written, and as it becomes current.

`megatron-rl prove-resume` does the same for every preset, at points drawn at random.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from megatron_rl.resume_proof import starts
from megatron_rl.resume_proof.kills import Kill
from megatron_rl.resume_proof.proof import differences, prove
from tests.warm import run_ranks

from .conftest import STATEFUL, Finished
from .job import write_recipe

pytestmark = pytest.mark.engine
# The warm-up of 30 steps, each with one update, is saved after its steps 10 and 20; old log-probs come before RL's updates.
KILLS = [Kill("update", 28), Kill("old_log_prob", 2, 0.1), Kill("write", 2), Kill("rename", 1)]


def test_what_is_killed_four_times_ends_as_what_was_never_killed(
    tmp_path: Path, straight: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "run_ranks", run_ranks)
    proof = prove(write_recipe(tmp_path), STATEFUL, tmp_path, KILLS, straight.run_dir)
    assert proof.killed == KILLS
    assert proof.differences == []
    second = (tmp_path / "killed" / "logs" / "attempt_2" / "rank_0.log").read_text()
    assert re.search(r"continuing after step (10|20) of the warm-up", second)


def test_the_comparison_sees_a_difference(tmp_path: Path, straight: Finished) -> None:
    other = tmp_path / "other"
    shutil.copytree(straight.run_dir, other)
    assert differences(straight.run_dir, other) == []
    metrics = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(metrics.replace('"reward/mean": ', '"reward/mean": 1', 1))
    weights = other / "export" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    found = differences(straight.run_dir, other)
    assert any("reward/mean" in text for text in found)
    assert "export/model.safetensors" in found
