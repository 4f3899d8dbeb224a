"""Seconds that training waits for a checkpoint, against the checkpoint's size: synchronous and asynchronous saves in one run.

`python -m benchmarks.saving [--layers 8 --hidden 768 --saves 4] [--out DIR]`: one process, an actor in fp32 with Adam,
saves to the disk under `--out`, with updates going on beside the asynchronous ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.others import told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--saves", type=int, default=4, help="of each kind; the first of each is not counted")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_saving"))
    args = parser.parse_args(arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(place)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    measure(args.out, args.layers, args.hidden, args.saves)
    shutil.rmtree(args.out)
    return 0


def measure(folder: Path, layers: int, hidden: int, saves: int) -> None:
    import torch

    from megatron_rl.actor.actor import Actor
    from megatron_rl.algorithms.metrics import Metrics
    from megatron_rl.checkpoint.saver import Saver
    from megatron_rl.config.model import CreateModelConfig
    from megatron_rl.config.schema import Config
    from megatron_rl.data.batch import TokenBatch
    from megatron_rl.runtime import distributed
    from megatron_rl.weights.create import create_model

    torch.set_num_threads(1)
    heads = hidden // 64
    shape = CreateModelConfig(layers, hidden, heads, heads, 64, 4 * hidden, vocab_size=8192)
    create_model(folder / "model", shape, seed=1)
    config = Config(run_dir=str(folder))
    config.model.dtype = "float32"
    actor = Actor(config, distributed.initialize(config.actor.parallel, 30), folder / "model")
    actor.start_optimizer(config.actor.optimizer, 1000)
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, 60, size=64) for _ in range(2)]

    def loss(number: int, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> tuple[torch.Tensor, Metrics]:
        return -log_probs.mean(), Metrics()

    def learn() -> float:
        begin = time.perf_counter()
        actor.update(actor.micro_batches(TokenBatch.continuations(zip(rows, rows, strict=True))), loss, temperature=1.0)
        return time.perf_counter() - begin

    learn()
    alone = median(learn() for _ in range(3))
    print(f"an update takes {alone:.2f} s with nothing beside it")
    blocked: dict[bool, float] = {}
    for asynchronous in (False, True):
        saver = Saver(folder, folder / "checkpoints", actor.grid, asynchronous, after=lambda: None)
        beside: list[float] = []
        outcomes = []
        for step in range(saves):
            learn()
            saver.submit(step, saver.take(actor.chunks, actor.optimizer), {}, {"state.json": b"{}"})
            while saver.busy():
                beside.append(learn())
            saver.drain()
            outcomes += saver.outcomes()
            shutil.rmtree(folder / "checkpoints" / f"step_{step}")
        assert all(outcome.error is None for outcome in outcomes)
        counted = outcomes[1:]
        blocked[asynchronous] = median(outcome.blocked for outcome in counted)
        size = counted[0].num_bytes / 2**30
        waited, kind = blocked[asynchronous], "asynchronous" if asynchronous else "synchronous"
        print(
            f"{kind}: {size:.2f} GiB, training waited {waited:.2f} s ({waited / size:.2f} s/GiB; the first time "
            f"{outcomes[0].blocked:.2f} s), written in {median(outcome.seconds for outcome in counted):.2f} s"
            + (f", an update beside it took {median(beside):.2f} s" if beside else "")
        )
    print(f"asynchronous saves keep training waiting {blocked[True] / blocked[False]:.0%} as long as synchronous ones")


if __name__ == "__main__":
    with told():
        sys.exit(main())
