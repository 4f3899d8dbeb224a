"""How ranks are started that may be killed: as new processes, or as forks of one that has imported everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_rl.config import load_recipe
from megatron_rl.config.machine import count_gpus
from megatron_rl.resume_proof import kills
from megatron_rl.resume_proof.kills import Kill, as_rank
from megatron_rl.runtime.attempts import ATTEMPT, free_port, new_attempt, rank_environment
from megatron_rl.runtime.spawn import run_ranks
from megatron_rl.trainer.rank.imports import import_all

# Starts all ranks of (command, resolved recipe, run folder) up to the end or the kill; the exit code.
Start = Callable[[str, str, Path, Kill | None], int]


def start_anew(command: str, recipe: str, run_dir: Path, kill: Kill | None = None) -> int:
    """Starts a run as the command line does: in new processes."""
    processes = _write(recipe, run_dir)
    arguments = [sys.executable, "-m", kills.__name__, command, str(run_dir), _json(kill)]
    return run_ranks(arguments, processes, new_attempt(run_dir), rank_environment(count_gpus())).code


def _write(recipe: str, run_dir: Path) -> int:
    """`recipe.yaml` in its place; how many processes it wants."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.yaml").write_text(recipe)
    processes = load_recipe(run_dir / "recipe.yaml").launch.processes
    assert processes is not None  # `check` has filled it in
    return processes


def _json(kill: Kill | None) -> str:
    return json.dumps(kill and vars(kill))


class Forge:
    """Starts ranks as forks of a process that has imported everything."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **rank_environment(0)},
        )

    def __call__(self, command: str, recipe: str, run_dir: Path, kill: Kill | None = None) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        processes = _write(recipe, run_dir)
        print(json.dumps([command, str(run_dir), processes, kill and vars(kill)]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that ranks are forked from has ended")
        return int(answer)

    def close(self) -> None:
        self._process.communicate()  # it ends with its input


def forge() -> int:
    """Forks the ranks of every start that standard input asks for."""
    import_all()
    for line in sys.stdin:
        command, run_dir, processes, kill = json.loads(line)
        print(_fork_ranks(command, run_dir, processes, Kill(**kill) if kill else None), flush=True)
    return 0


def _fork_ranks(command: str, run_dir: str, processes: int, kill: Kill | None) -> int:
    attempt = new_attempt(Path(run_dir))
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), ATTEMPT: str(attempt.absolute())}
    world |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    running: list[int] = []
    killing = 0 if kill is None else kill.rank  # the last, so that it knows the others
    for rank in sorted(range(processes), key=lambda rank: rank == killing):
        pid = os.fork()
        if pid == 0:
            _become(rank, world, attempt, lambda: as_rank(command, run_dir, kill, lambda: running))
        running.append(pid)
    first = 0
    while running:
        pid, status = os.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the rank has started
        running.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return 128 - first if first < 0 else first


def _become(rank: int, world: Mapping[str, str], attempt: Path, work: Callable[[], int]) -> None:
    """Becomes a rank, in a fork: runs it, and ends the process."""
    code = 1
    try:
        os.setsid()
        os.environ.update({**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        log = os.open(attempt / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(forge())
