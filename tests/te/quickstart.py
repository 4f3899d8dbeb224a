"""By hand: the quick start's RL with Transformer Engine's layers, in bf16 and in FP8, with vLLM in the process.

`python -m tests.te.quickstart OUT [OVERRIDE ...]` prints the evaluations of each. Both begin with the warm-up's model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes" / "cpu" / "quickstart.yaml"
RL = (
    "model.create=null",
    "sft.steps=0",
    "trainer.steps=60",
    "checkpoint.every=0",
    "model.dtype=bfloat16",
    "launch.processes=1",
)
KINDS = {"bf16": (), "blockwise": ("actor.fp8.recipe=blockwise", "rollout.sync_tolerance=1")}  # vLLM computes in bf16


def main(out: Path, overrides: list[str]) -> None:
    warm = out / "warm"
    if not warm.exists():
        plain = [sys.executable, "-m", "megatron_rl", "sft", str(RECIPE), f"run_dir={warm}", "launch.processes=1"]
        subprocess.run(plain, check=True, stdout=subprocess.DEVNULL)
    for kind, own in KINDS.items():
        given = [f"run_dir={out / kind}", f"model.path={warm / 'export'}", *RL, *own, *overrides]
        (out / kind).mkdir()
        with (out / f"{kind}.log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-m", "tests.te.quickstart", "--rank", *given], check=True, stdout=log, stderr=log
            )
        rows = [json.loads(line) for line in (out / kind / "metrics.jsonl").read_text().splitlines()]
        shown = {row["step"]: row["eval/chain_sum_test/avg@1"] for row in rows if "eval/chain_sum_test/avg@1" in row}
        seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
        print(kind, json.dumps(shown), f"{sum(seconds) / len(seconds):.1f} s a step", flush=True)


def rank(overrides: list[str]) -> None:
    """The only process of a run."""
    from tests.te.standin.install import install

    install()
    import torch

    from megatron_rl.config import load_recipe
    from megatron_rl.runtime import distributed
    from megatron_rl.seams.known_warnings import quiet_known_warnings
    from megatron_rl.trainer.loop import train
    from megatron_rl.trainer.run import build_run
    from tests.te.fp8 import as_on_a_gpu

    quiet_known_warnings()
    as_on_a_gpu()
    config = load_recipe(RECIPE, overrides)
    torch.manual_seed(config.seed)
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=5)
    run = build_run(config, grid, Path(config.run_dir))
    train(run, "never")
    run.close()


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29791",
        }
        rank(sys.argv[2:])
    else:
        main(Path(sys.argv[1]).resolve(), sys.argv[2:])
