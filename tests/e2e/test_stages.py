"""Fine-tuning that evaluates on its way, and RL that begins with its adapters: two commands, as a user gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .job import Job, rows

pytestmark = pytest.mark.engine
ALONE = ("launch.processes=1", "actor.parallel.tensor=1", "rollout.tensor_parallel=1")
LORA = (*ALONE, "actor.lora.rank=8", "checkpoint.every=0")


def test_fine_tuning_evaluates_by_loss_and_by_generation_and_rl_goes_on_from_its_adapters(tmp_path: Path) -> None:
    overrides = (
        "sft.steps=0",
        "sft.epochs=2",
        "sft.eval_every=10",
        "tasks.eval.held_out.demonstrations=chain_sum_steps",
    )
    tuning = Job(tmp_path / "tuned", *LORA, "actor.lora.dropout=0.1", *overrides, command="sft")
    tuning.succeed()
    tuned = [row for row in rows(tuning.run_dir) if "eval/held_out/avg@1" in row]
    assert [row["step"] for row in tuned] == [10, 20, 24], (
        "2 epochs of the demonstrations that are not held out, 32 a step"
    )
    assert [path.name for path in (tuning.run_dir / "samples").iterdir()] == ["eval_held_out_step_24.jsonl"]
    losses = [row["eval/held_out/loss"] for row in tuned]
    assert losses[0] > losses[1] > losses[2]

    begin = (f"model.path={tuning.run_dir / 'model'}", f"actor.lora.path={tuning.run_dir / 'adapter'}", "sft.steps=0")
    by_vllm = "actor.lora.sync=adapters"  # whose evaluation below is then also that of the merged weights above
    rl = Job(tmp_path / "rl", *LORA, *begin, by_vllm, "trainer.steps=1", "checkpoint.export=false")
    rl.succeed()
    [drawn] = (row["mismatch/abs_log_ratio_max"] for row in rows(rl.run_dir) if "mismatch/abs_log_ratio_max" in row)
    assert drawn < 1e-4
    first, *_ = (row for row in rows(rl.run_dir) if "eval/held_out/avg@1" in row)
    assert first["step"] == 0
    assert first["eval/held_out/avg@1"] == tuned[-1]["eval/held_out/avg@1"]
    assert first["eval/held_out/response_length"] == tuned[-1]["eval/held_out/response_length"]
