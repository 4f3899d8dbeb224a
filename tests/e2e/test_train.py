"""One run from a random model to an exported one, through the command line, on the real stack."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from megatron_rl.config import load_recipe
from megatron_rl.report.status import read_status

from .conftest import Finished
from .job import HAS_SHARED_COLLECTIVES, RECIPE, rows, samples

pytestmark = pytest.mark.engine
STEPS = RECIPE["trainer"]["steps"]
METRICS = (
    *("reward/mean", "reward/std", "reward/correct", "reward/format", "reward/judge"),
    *("reward_group_std/correct", "reward_signal_share/correct", "groups/signal_share", "groups/trained"),
    *("advantage/mean", "advantage/abs_mean", "advantage/max", "ratio/mean", "ratio/max", "loss/objective"),
    *(f"region_share/{region}" for region in ("M", "LN", "HP", "LP", "HN")),
    *("actor/entropy", "actor/grad_norm", "actor/grad_norm_max", "actor/lr", "actor/updates"),
    *("old_policy/kl_k1", "old_policy/kl_k3", "reference/kl_k3", "sync/logprob_max_diff"),
    *(f"mismatch/{name}" for name in ("kl_k1", "kl_k3", "abs_log_ratio", "abs_log_ratio_max")),
    *("response_length/mean", "response_length/max", "response_length/truncated_share", "prompt_length/mean"),
    *("perf/tokens_per_s", "perf/generated_tokens_per_s", "perf/total_tokens", "memory/host_peak_gib"),
    *(f"timing_s/{phase}" for phase in ("generate", "reward", "estimate", "old_log_prob", "ref_log_prob", "update")),
    *("timing_s/sync", "timing_s/sync_check", "timing_s/step"),
)
EVALUATION = [f"eval/held_out/{name}" for name in ("avg@1", "pass@1", "response_length", "truncated_share")]


def test_it_ends_well_and_says_what_happened(straight: Finished) -> None:
    assert straight.code == 0, straight.stderr
    assert straight.stderr == ""
    for shown in ("SFT", "RL", f"step    {STEPS}  reward", "held_out/avg@1", "Time within RL steps", "metrics.jsonl"):
        assert shown in straight.stdout, shown
    assert "Traceback" not in straight.stdout


def test_nothing_is_left_behind(straight: Finished) -> None:
    assert len(straight.pids) == 2
    assert straight.left_processes == []
    assert straight.segments == [], "shared memory keeps no name once it is mapped, so that no SIGKILL can leave it"
    assert straight.sockets == []
    assert len(straight.mapped) >= 1 + HAS_SHARED_COLLECTIVES, "vLLM's message queue, and its collectives on a CPU"
    assert all(re.fullmatch(r"/dev/shm/megatron_rl-\S+ \(deleted\)", name) for name in straight.mapped)


def test_it_listens_within_the_machine_only(straight: Finished) -> None:
    assert straight.listening, "the rendezvous and gloo listen somewhere"
    assert set(straight.listening) == {"127.0.0.1"}


def test_the_run_folder_is_complete(straight: Finished) -> None:
    folder = straight.run_dir
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["algorithm"]["preset"] == "awpo"
    assert load_recipe(folder / "recipe.yaml").trainer.steps == STEPS
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {f"step_{n}" for n in range(STEPS + 1)}
    assert sorted(path.name for path in (folder / "samples").iterdir()) == sorted(
        [*(f"step_{n}.jsonl" for n in range(1, STEPS + 1)), *(f"eval_held_out_step_{n}.jsonl" for n in (0, STEPS))]
    )
    for row in samples(folder, "step_2.jsonl"):  # a recorded step
        assert len(row["pieces"]) == row["tokens"]
        assert "".join(row["pieces"]).startswith(row["response"])
    assert "pieces" not in samples(folder, "step_1.jsonl")[0]
    assert list((folder / "tensorboard").glob("events.*"))
    assert (folder / "report.html").stat().st_size > 10_000
    logs = folder / "logs" / "attempt_1"
    assert sorted(path.name for path in logs.glob("*.log")) == ["rank_0.log", "rank_1.log"]
    written = json.loads((logs / "environment.json").read_text())
    assert written["versions"]["megatron-core"]
    assert written["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"  # on a CPU
    assert not (folder / "postmortem").exists()
    status = read_status(folder)
    assert (status.state, status.step, status.checkpoint) == ("finished", STEPS, f"step_{STEPS}")
    assert status.continue_with is None
    assert "Traceback" not in (logs / "rank_0.log").read_text() + (logs / "rank_1.log").read_text()
    assert [row["step"] for row in rows(folder, "sft/metrics.jsonl")] == [10, 20, 30]
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in (folder / "export").iterdir()
    }


def test_every_step_has_every_metric_and_all_are_finite(straight: Finished) -> None:
    table = rows(straight.run_dir)
    assert [row["step"] for row in table] == list(range(STEPS + 1))
    for row in table:
        assert all(math.isfinite(value) for value in row.values()), row
        if row["step"]:
            assert not [name for name in METRICS if name not in row]
        if row["step"] in (0, 2, 4):
            assert not [name for name in EVALUATION if name not in row]


def test_the_metrics_agree_with_each_other(straight: Finished) -> None:
    weights = {name: reward.get("weight", 1.0) for name, reward in RECIPE["rewards"].items()}
    updates = RECIPE["trainer"]["minibatches"]
    moved = False
    for row in rows(straight.run_dir)[1:]:
        total = sum(weight * row[f"reward/{name}"] for name, weight in weights.items())
        assert row["reward/mean"] == pytest.approx(total)
        assert sum(row[f"region_share/{region}"] for region in ("M", "LN", "HP", "LP", "HN")) == pytest.approx(1)
        assert row["rollouts/sampled"] == 32
        assert row["actor/updates"] == updates
        assert row["actor/lr"] == RECIPE["actor"]["optimizer"]["lr"]
        phases = sum(value for name, value in row.items() if name.startswith("timing_s/")) - row["timing_s/step"]
        assert 0.5 * row["timing_s/step"] < phases <= row["timing_s/step"] * 1.001
        assert row["sync/logprob_max_diff"] < 1e-4  # fp32: the engine computes what the actor does
        assert row["mismatch/abs_log_ratio_max"] < 1e-3
        moved = moved or row["old_policy/kl_k3"] > 1e-9
    assert moved, "the second minibatch's ratios never left 1"


def test_the_samples_are_whole_groups_with_rewards_and_advantages(straight: Finished) -> None:
    records = samples(straight.run_dir, "step_1.jsonl")
    assert [record["rollout"] for record in records] == [0, 1, 2, 3] * 8
    for record in records:
        assert set(record["rewards"]) == {"correct", "format", "judge"}
        assert record["finish_reason"] in ("stop", "length")
        assert 1 <= record["tokens"] <= RECIPE["rollout"]["max_tokens"]
        assert math.isfinite(record["advantage"])
    assert len({record["sample"] for record in records}) == 8
    assert len({record["response"] for record in records}) > 4


def test_transformers_generates_from_the_export_what_the_engine_did(straight: Finished) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = straight.run_dir / "export"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    records = samples(straight.run_dir, f"eval_held_out_step_{STEPS}.jsonl")
    assert len(records) == 16
    for record in records:
        prompt = tokenizer(record["prompt"], return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=RECIPE["rollout"]["max_tokens"],
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        response = out[0, prompt.shape[1] :]
        assert tokenizer.decode(response, skip_special_tokens=True) == record["response"]
        assert len(response) == record["tokens"]


def test_the_export_is_what_was_trained_and_not_what_it_started_from(straight: Finished) -> None:
    from safetensors.torch import load_file

    start = load_file(straight.run_dir / "model" / "model.safetensors")
    end = load_file(straight.run_dir / "export" / "model.safetensors")
    after_sft = load_file(next(Path(straight.run_dir / "reference").glob("*.safetensors")))
    assert start.keys() == end.keys() == after_sft.keys()
    for name, tensor in end.items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, start[name]), name
        assert not torch.equal(tensor, after_sft[name]), name
