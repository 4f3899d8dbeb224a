"""A mixture of experts through the whole loop: whole experts on two tensor-parallel ranks, vLLM's tensor parallel on both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from models import tiny

from megatron_rl.config.model import CreateModelConfig
from megatron_rl.weights.create import create_model

from .job import Job, untimed
from .job import rows as read_rows


@pytest.mark.engine
def test_experts_are_trained_and_reach_the_engine_after_every_step(tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    create_model(folder, CreateModelConfig(layers=1, hidden_size=64, heads=4, ffn_size=64), seed=0)
    # 48 is not what vLLM's kernels for experts take on a CPU: it pads them, again after every sync.
    experts = {"num_hidden_layers": 2, "head_dim": 32, "hidden_size": 64, "moe_intermediate_size": 48, "vocab_size": 64}
    written = tiny.write(tmp_path / "weights", "qwen3_moe", **experts, eos_token_id=1, pad_token_id=0)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(written / name, folder / name)
    every_second = "rollout.sync_check_every=2"
    layout = (every_second, "actor.parallel={tensor: 2, expert: 2, sequence: true}", "sft.steps=4", "trainer.steps=2")
    recipe = (
        f"model.path={folder}",
        "model.create=null",
        *layout,
        "actor.moe.routing_replay=rollout",
        "sft.log_every=4",
    )
    job = Job(tmp_path, *recipe)
    assert job.finish() == 0, job.stderr
    rows = read_rows(job.run_dir)
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 2
    assert "sync/logprob_mean_diff" not in steps[0]
    assert steps[1]["sync/logprob_mean_diff"] < 3e-5  # else the run would have stopped with a SyncError
    # In fp32 both would choose the same experts; those of another token, layer or request would be seen.
    assert all(row["mismatch/abs_log_ratio_max"] < 1e-4 for row in steps)
    assert sum(row["actor/updates"] for row in steps) > 0
    exported = json.loads((job.run_dir / "export" / "config.json").read_text())
    assert exported["architectures"] == ["Qwen3MoeForCausalLM"]
    warmed = read_rows(job.run_dir, "sft/metrics.jsonl")
    assert 1 <= warmed[-1]["experts/load"] <= warmed[-1]["experts/load_max"] <= 8 / 2
    described = json.loads((folder / "config.json").read_text())
    layers, experts, chosen = (
        described[name] for name in ("num_hidden_layers", "num_local_experts", "num_experts_per_tok")
    )
    counted = [(row, row["response_length/mean"] * row["rollouts/sampled"]) for row in steps]
    for row, tokens in [*counted, (warmed[-1], warmed[-1]["sft/tokens"])]:
        mean = tokens * chosen / experts  # of a layer's experts: the step's tokens, and no others
        for load in (row["experts/load_max"], layers * row["experts/load"]):
            busiest = load * mean
            assert busiest == pytest.approx(round(busiest), abs=1e-6), "a number of tokens"
    # What the warm-up counted is not in RL's first step: a run that never had one writes the same row.
    resumed = Job(tmp_path / "resumed", *recipe, "--resume", str(job.run_dir / "checkpoints" / "step_0"))
    assert resumed.finish() == 0, resumed.stderr
    assert [untimed(row) for row in read_rows(resumed.run_dir)] == [untimed(row) for row in steps]
