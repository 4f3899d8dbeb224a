"""A rank of `megatron-rl selftest` with a fault: a wrong weight after a reload, wrong masters after a resume."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import store
from megatron_rl.rollout.sync import SlicedSync
from megatron_rl.rollout.vllm_probe import VllmProbe
from megatron_rl.selftest import rank

WRONG = "model.layers.1.input_layernorm.weight"


def main(step: str, folder: Path) -> None:
    push, load = SlicedSync.push, store.load

    def push_wrongly(sync: SlicedSync) -> None:
        push(sync)
        VllmProbe(sync.engine, sync.grid).parameters()[WRONG].data.mul_(1.5)

    def load_wrongly(folder: Path, chunks: Sequence[Any], optimizer: Any, grid: Any) -> None:
        load(folder, chunks, optimizer, grid)
        if folder.name == "step_1":
            optimizer.param_groups[0]["params"][0].data.mul_(1.5)

    SlicedSync.push, store.load = push_wrongly, load_wrongly  # type: ignore[method-assign]
    rank.main(step, folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
