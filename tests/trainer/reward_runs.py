"""What ranks do in test_reward_model: a run without a stop; one that is stopped, and continued, also at another layout."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import torch

from megatron_rl.runtime.stop import StopRequested
from megatron_rl.trainer.reward_model import reward_model
from tests.checkpoint.ranks import Layout
from tests.checkpoint.whole_runs import _StopsAfter, end, start

LAYOUT, OTHER = Layout(), Layout(tensor=2)


def run_all(root_: str) -> None:
    root = Path(root_)
    for name in ("straight", "stopped"):
        run = start(root, name, LAYOUT, command="reward-model")
        if name == "stopped":
            run.stop = _StopsAfter(2)  # type: ignore[assignment]
        with contextlib.suppress(StopRequested):
            reward_model(run, "auto")
        end(run)
    for name, layout in (("continued", LAYOUT), ("elsewhere", OTHER)):
        if int(torch.distributed.get_rank()) == 0:
            shutil.copytree(root / "stopped", root / name)
        torch.distributed.barrier()
        run = start(root, name, layout, command="reward-model")
        reward_model(run, "auto")
        end(run)
