"""Kills, and what a rank does that has one to come; started as a module, a rank or the process that ranks are forked from."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.agents.journal import ConversationJournal
from megatron_rl.runtime.heartbeat import HEARTBEAT
from megatron_rl.runtime.rank_job import RankJob
from megatron_rl.trainer.rank.main import main as run_rank


@dataclass(frozen=True)
class Kill:
    """SIGKILL to every rank, `delay` seconds after the `count`-th time that `rank` comes to `point` in this start, from step
    `step` on."""

    point: str
    count: int = 1
    delay: float = 0.0
    step: int = 0
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.point} {self.count} + {self.delay:.2f} s from step {self.step} on"


def as_rank(command: str, run_dir: str, kill: Kill | None, others: Callable[[], Sequence[int]]) -> int:
    """`others`: the processes of the other ranks."""
    scramble()
    if kill is not None and os.environ["RANK"] == str(kill.rank):
        arm(kill, others)
    return run_rank(RankJob(command, run_dir, str(Path(run_dir) / "recipe.yaml")))


def scramble() -> None:
    """Gives every generator of random numbers another state whenever a phase begins: a run may depend on none of them."""
    import torch

    enter = HEARTBEAT.enter

    def entered(phase: str) -> None:
        seed = int.from_bytes(os.urandom(4), "little")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        enter(phase)

    HEARTBEAT.enter = entered  # type: ignore[method-assign]


def arm(kill: Kill, others: Callable[[], Sequence[int]]) -> None:
    """Hooks the function that marks the point."""
    seen = 0

    def die() -> None:
        """Ends as a machine that goes down: nobody gets to do anything more, this process last."""
        for pid in others():
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def passing(name: str) -> None:
        nonlocal seen
        if name != kill.point or HEARTBEAT.step < kill.step:
            return
        seen += 1
        if seen == kill.count and kill.delay:
            threading.Timer(kill.delay, die).start()
        elif seen == kill.count:
            die()

    from megatron_rl.checkpoint import saver
    from megatron_rl.checkpoint import snapshot as snapshots

    if kill.point == "write":
        snapshots.write_share = _after(lambda: passing("write"), snapshots.write_share)
    elif kill.point == "rename":
        saver._replace = _after(lambda: passing("rename"), saver._replace)
    elif kill.point == "turn":
        keep_turn = ConversationJournal.keep_turn

        def kept(*arguments: Any) -> bool:
            if is_new := keep_turn(*arguments):
                passing("turn")
            return is_new

        ConversationJournal.keep_turn = kept  # type: ignore[method-assign, assignment]
    else:
        enter = HEARTBEAT.enter

        def entered(name: str) -> None:
            enter(name)  # so that the heartbeat says where it ended
            passing(name)

        HEARTBEAT.enter = entered  # type: ignore[method-assign, assignment]


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any, **more: Any) -> Any:
        first()
        return then(*arguments, **more)

    return both


def siblings() -> list[int]:
    """The other ranks that this process's launcher has started."""
    parent = os.getppid()
    return [
        int(pid)
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if int(pid) != os.getpid()
        and any(name.startswith(b"RANK=") for name in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    ]


if __name__ == "__main__":
    _command, _run_dir, _kill = sys.argv[1:]
    sys.exit(as_rank(_command, _run_dir, Kill(**json.loads(_kill)) if _kill != "null" else None, siblings))
