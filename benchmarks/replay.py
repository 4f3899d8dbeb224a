"""What routing replay costs and changes: a small mixture of experts in bf16 on a CPU, with each `actor.moe.routing_replay`.

python -m benchmarks.replay [--folder DIR] [OVERRIDE ...]

The model has the form of Qwen3-MoE: 6 layers of hidden size 128, 4 of 32 experts per token, random weights. Each run takes 4
steps of 128 responses in 4 minibatches, by one process; its figures are the smallest and the largest over the steps.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.config.model import CreateModelConfig

RECIPE = Path(__file__).parents[1] / "recipes" / "cpu" / "quickstart.yaml"
KINDS = ("none", "old_log_probs", "rollout")
SHAPE = CreateModelConfig(layers=6, hidden_size=128, heads=4, kv_heads=2, head_dim=32, ffn_size=256, init_std=0.08)
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
RUN = (
    "model.create=null",
    "model.dtype=bfloat16",
    "sft.steps=0",
    "trainer.steps=4",
    "trainer.prompts_per_step=16",
    "trainer.minibatches=4",
    "trainer.eval_every=0",
    "actor.optimizer={lr: 1.0e-5, warmup_steps: 0}",
    "rollout.sync_tolerance=1",
    "rollout.sync_check_every=1",
    "checkpoint.every=0",
    "launch.processes=1",
    "rewards={correct: null, format: null, judge: null}",
)
# Random weights solve nothing: a reward that differs between responses gives the update something to do.
REWARD = """
def digits():
    return lambda completion, sample: sum(character.isdigit() for character in completion) / max(1, len(completion))
"""
METRICS = (
    "mismatch/abs_log_ratio",
    "mismatch/abs_log_ratio_max",
    "mismatch/kl_k3",
    "sync/logprob_mean_diff",
    "sync/experts_max_diff",
    "ratio/max",
    "old_policy/kl_k3",
    "timing_s/generate",
    "timing_s/update",
    "timing_s/step",
)
CPU = "CPU seconds of the run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where model and runs go; default: a temporary one")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        write_model(folder / "model")
        (folder / "reward.py").write_text(REWARD)
        table = Table("", *KINDS)
        runs = [run(folder, kind, overrides) for kind in KINDS]
        for name in METRICS:
            shown = (f"{min(found):.3g} to {max(found):.3g}" if (found := values[name]) else "" for values in runs)
            table.add_row(name, *shown)
        table.add_row(CPU, *(f"{values[CPU][0]:.0f}" for values in runs))
        Console(width=120).print(table)


def write_model(folder: Path) -> None:
    import transformers

    from megatron_rl.models.registry import created_config
    from megatron_rl.weights.create import random_weights, write_tokenizer
    from megatron_rl.weights.files import save_tensors

    folder.mkdir(parents=True)
    fields = created_config(SHAPE, experts=EXPERTS["num_experts"]) | EXPERTS
    transformers.AutoConfig.for_model(**fields).save_pretrained(folder)
    write_tokenizer(folder, SHAPE)
    save_tensors(folder / "model.safetensors", random_weights(folder, SHAPE.init_std, seed=0))


def run(folder: Path, kind: str, overrides: list[str]) -> dict[str, list[float]]:
    """Every metric's values over the steps."""
    given = [f"run_dir={folder / kind}", f"model.path={folder / 'model'}", f"actor.moe.routing_replay={kind}"]
    given.append(f"rewards.digits.reward={folder / 'reward.py'}:digits")
    command = [sys.executable, "-m", "megatron_rl", "train", str(RECIPE), *RUN, *given, *overrides]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (folder / kind / "metrics.jsonl").read_text().splitlines()]
    found = {name: [row[name] for row in rows if name in row] for name in METRICS}
    return found | {CPU: [after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime]}


if __name__ == "__main__":
    main()
