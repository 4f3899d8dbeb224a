"""A plugin that stops a rank for good in the middle of one of its calls: SIGSTOP, as a debugger or a sick machine would.

`STOP=<phase>:<rank>` in the environment says where. With `EXHAUST=1` the rank runs out of memory there instead. It knows
nothing of how the product follows its phases.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def stop_in(owner: Any, name: str, when: Callable[..., bool] = lambda *args, **kwargs: True, after: int = 0) -> None:
    original, left = getattr(owner, name), [after]

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                exhaust() if "EXHAUST" in os.environ else os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def exhaust() -> None:
    """Allocates more than the address space may grow by."""
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.zeros(2**30, dtype=torch.uint8)


def install(phase: str) -> None:
    from megatron_rl.actor.actor import Actor
    from megatron_rl.checkpoint.saver import Saver
    from megatron_rl.rewards import Scorer
    from megatron_rl.rollout.sync import SlicedSync
    from megatron_rl.runtime import leftovers
    from megatron_rl.trainer.sampler import Sampler

    if phase == "generate":
        stop_in(Sampler, "generate", lambda self, samples, count, sampling, step, *more, **named: step == 1)
    elif phase == "evaluate":
        stop_in(Sampler, "generate", lambda self, samples, count, sampling, step, *more, **named: step < -1)
    elif phase == "reward":
        stop_in(Scorer, "score", after=1)  # after the evaluation before the first step
    elif phase == "old_log_prob":
        stop_in(Actor, "log_probs", lambda *args, with_entropy=False, **kwargs: with_entropy)
    elif phase == "update":
        stop_in(Actor, "update")
    elif phase == "checkpoint":
        stop_in(Saver, "take")
    elif phase == "engine start":
        stop_in(leftovers, "remove_segments")
    elif phase == "sync":
        stop_in(SlicedSync, "push", after=2)  # after the start's, and that of the checkpoint before the first step
    else:
        raise ValueError(phase)


if "RANK" in os.environ and "STOP" in os.environ:
    where, rank = os.environ["STOP"].split(":")
    if os.environ["RANK"] == rank:
        install(where)
