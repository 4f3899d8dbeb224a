"""A launcher and its ranks, small processes, for the tests of both."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

LAUNCHER = """
import sys
from pathlib import Path
from megatron_rl.runtime.spawn import Graces, run_ranks
given = [sys.executable, "-m", "rank", sys.argv[1]], int(sys.argv[2]), Path(sys.argv[1])
outcome = run_ranks(*given, graces=Graces(0.5, 0.5, 0.5), imports=sys.argv[3] or None)
print(outcome.message, file=sys.stderr)
sys.exit(outcome.code)
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
from megatron_rl.runtime import stop
rank = int(os.environ["RANK"])
folder = Path(sys.argv[1])
def wait_for_rank_0():
    while not (folder / "pid_0").exists():
        time.sleep(0.01)
def here(name="pid"):
    (folder / f"{name}_{rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{name}_{rank}.tmp").rename(folder / f"{name}_{rank}")
stop.let_through()
"""


class Launched:
    """A launcher with ranks that run `script`; they leave their process ids in files `pid_<rank>`.

    `imports`: the body of `import_all` of the process that forks them; None: they are processes of their own."""

    def __init__(self, folder: Path, script: str, processes: int, imports: str | None) -> None:
        self.folder, self.processes = folder, processes
        (folder / "rank.py").write_text(RANK + textwrap.dedent(script))
        if imports is not None:
            body = textwrap.indent(textwrap.dedent(imports), "    ")
            (folder / "imported.py").write_text(f"def import_all():\n{body}\n")
        command = [
            sys.executable,
            "-c",
            LAUNCHER,
            str(folder),
            str(processes),
            "imported" if imports is not None else "",
        ]
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )

    def pids(self, name: str = "pid") -> list[int]:
        """Waits until every rank has said `here(name)`."""
        files = [self.folder / f"{name}_{rank}" for rank in range(self.processes)]
        wait_until(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
