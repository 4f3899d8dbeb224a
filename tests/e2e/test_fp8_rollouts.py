"""A run whose engine draws with weights in FP8: on a CPU with the numbers that their values and scales stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from .job import Job, rows, untimed

SIZES = (
    "model.create.hidden_size=128",
    "model.create.kv_heads=4",
    "model.create.ffn_size=256",
    "model.create.head_dim=64",
)
CHANGES = (
    *SIZES,
    "rollout.fp8=blockwise",
    "sft.steps=8",
    "trainer.steps=2",
    "trainer.eval_every=0",
    "checkpoint.every=0",
)


@pytest.mark.engine
def test_the_engine_draws_with_rounded_weights_and_the_loss_is_corrected(tmp_path: Path) -> None:
    jobs = [Job(tmp_path / sync, *CHANGES, f"rollout.sync={sync}") for sync in ("sliced", "whole")]
    for job in jobs:
        assert job.finish() == 0, job.stderr
        assert "corrected by algorithm.correction.weight=token" in job.stdout
        assert "not in slices" not in job.stdout
    sliced, whole = ([untimed(row) for row in rows(job.run_dir)] for job in jobs)
    assert sliced == whole, "a slice is rounded as the tensor that it is of"
    assert yaml.safe_load((jobs[0].run_dir / "recipe.yaml").read_text())["algorithm"]["correction"]["weight"] == "token"
    for row in sliced[1:]:
        assert 1e-4 < row["sync/logprob_mean_diff"] < 0.2, (
            "in fp32 an engine with the actor's own weights differs by 1e-6"
        )
        assert row["mismatch/abs_log_ratio"] > 1e-4
        assert row["correction/weight"] == pytest.approx(1, abs=0.05)
