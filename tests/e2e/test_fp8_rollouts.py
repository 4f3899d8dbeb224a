"""A run whose engine draws with weights in FP8: on a CPU with the numbers that their values and scales stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from .job import Job


@pytest.mark.engine
def test_the_engine_draws_with_rounded_weights_and_the_loss_is_corrected(tmp_path: Path) -> None:
    sizes = (
        "model.create.hidden_size=128",
        "model.create.kv_heads=4",
        "model.create.ffn_size=256",
        "model.create.head_dim=64",
    )
    job = Job(tmp_path, *sizes, "rollout.fp8=blockwise", "sft.steps=8", "trainer.steps=1", "checkpoint.every=0")
    assert job.finish() == 0, job.stderr
    assert yaml.safe_load((job.run_dir / "recipe.yaml").read_text())["algorithm"]["correction"]["weight"] == "token"
    assert "corrected by algorithm.correction.weight=token" in job.stdout
    [row] = [row for row in map(json.loads, (job.run_dir / "metrics.jsonl").read_text().splitlines()) if row["step"]]
    assert 1e-4 < row["sync/logprob_mean_diff"] < 0.2, "in fp32 an engine with the actor's own weights differs by 1e-6"
    assert row["mismatch/abs_log_ratio"] > 1e-4
    assert row["correction/weight"] == pytest.approx(1, abs=0.05)
