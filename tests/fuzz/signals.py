"""Signals at random moments from a command's first instruction on: each ends it with its own exit code, and leaves nothing.

    python -m tests.fuzz.signals --seconds 600 [--seed 1] [--real]

The launcher is the real one; without --real its ranks only wait for a signal, so that a strike takes a second. Moments before
the interpreter has reached the command's first line are left out: nothing that is written in Python could answer.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.runtime import stop
from tests.e2e.job import processes_of, write_recipe

# What a parent sees: the exit code, or the signal where its default action is the right one (a shell shows both alike).
CODES = {
    signal.SIGINT: {130},
    signal.SIGTERM: {143, -signal.SIGTERM},
    signal.SIGHUP: {129, -signal.SIGHUP},
    signal.SIGUSR1: {75},
}
_LOST = 120.0  # seconds after which a signal counts as lost
# The tests may run under nohup, which has what they start ignore SIGHUP.
COMMAND = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
import sys
import megatron_rl.__main__ as entry
from megatron_rl.launch import ranks
from megatron_rl.runtime import rank_job
sys.path.insert(0, folder := sys.argv.pop())
import os
os.environ["PYTHONPATH"] = folder
rank_job.MODULE = "rank"
ranks.imports_of = lambda config: "imported"
sys.exit(entry.main())
"""
RANK = """
import sys, time
time.sleep(0.1)
from megatron_rl.runtime.stop import StopFlag, stop_code
stop = StopFlag()
while not stop.signum:
    time.sleep(0.01)
stop.ignore()
sys.exit(stop_code(stop.signum))
"""


IMPORTED = """
import time
def import_all():
    time.sleep(0.2)
"""


@dataclass(frozen=True)
class Strike:
    number: signal.Signals
    delay: float  # seconds after the command's first instruction

    def __str__(self) -> str:
        return f"{self.number.name} after {self.delay:.3f} s"


def strike(folder: Path, strike: Strike, real: bool = False) -> list[str]:
    """Starts a run in an empty folder and signals it; what is wrong with its end."""
    recipe = str(write_recipe(folder))
    if real:
        command = [sys.executable, "-m", "megatron_rl", "train", recipe, "sft.steps=2", "trainer.steps=100000"]
    else:
        (folder / "rank.py").write_text(RANK)
        (folder / "imported.py").write_text(IMPORTED)
        command = [sys.executable, "-c", COMMAND, "train", recipe, str(folder)]
    with stop.held_back():  # a parent may have them blocked; the command answers all the same
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
            start_new_session=True,
        )
    while process.poll() is None and not _answers(process.pid):
        time.sleep(0.001)
    time.sleep(strike.delay)
    process.send_signal(strike.number)
    try:
        _, errors = process.communicate(timeout=_LOST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return [f"{strike}: lost"]
    problems = []
    if process.returncode not in CODES[strike.number]:
        problems.append(f"{strike}: exit code {process.returncode}")
    if "Traceback" in errors or "Exception ignored" in errors:
        problems.append(f"{strike}: a traceback")
    until = time.monotonic() + 5
    while (left := processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        problems.append(f"{strike}: processes {left} are left")
    return [f"{problem}\n{errors}" for problem in problems]


def _environment() -> dict[str, str]:
    """Without what a batch system or torchrun around this process says."""
    own = {name: value for name, value in os.environ.items() if not re.match(r"SLURM_|(WORLD_SIZE|RANK)$", name)}
    return {**own, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _answers(pid: int) -> bool:
    """Whether the command's first line has run: SIGUSR1 has a handler."""
    try:
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return True
    return found is not None and bool(int(found[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.signals", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, required=True, help="how long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="with the real ranks: half a minute a strike")
    args = parser.parse_args()
    chance, until, count, failed = random.Random(args.seed), time.monotonic() + args.seconds, 0, 0
    while time.monotonic() < until:
        one = Strike(chance.choice(list(CODES)), chance.uniform(0, 30 if args.real else 1.5))
        with tempfile.TemporaryDirectory(prefix="signals-") as folder:
            problems = strike(Path(folder), one, args.real)
        count, failed = count + 1, failed + bool(problems)
        for problem in problems:
            print(problem, flush=True)
    print(f"{count} signals, {failed} of them badly answered")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
