"""Starting `megatron-rl` as a user does, and looking at what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml

from tests.warm import Warm

STOPPING = Path(__file__).with_name("stopping.py")  # the plugin that stops a rank
SHARED_MEMORY = Path("/dev/shm")
CHAIN_SUM = {
    "source": "reasoning_gym",
    "name": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "prompt": "{expression:compact}=",
}
RECIPE: dict[str, Any] = {
    "seed": 3,
    "model": {
        "create": {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn_size": 128},
        "dtype": "float32",
    },
    "tasks": {
        "train": {"sums": {**CHAIN_SUM, "size": 400, "demonstrations": "chain_sum_steps", "exclude": ["held_out"]}},
        "eval": {"held_out": {**CHAIN_SUM, "size": 16, "seed": 77}},
    },
    "rewards": {
        "correct": {"reward": "puzzle", "params": {"after": "#", "partial": False}},
        "format": {"reward": "format", "params": {"pattern": "[^#]*#-?[0-9]+"}, "weight": 0.1},
        "judge": {"reward": "chain_sum_steps", "when_needed": True},
    },
    "rollout": {"tensor_parallel": 2, "group_size": 4, "max_prompt_tokens": 12, "max_tokens": 24, "cpu_cache_gib": 0.1},
    "actor": {
        "parallel": {"tensor": 2},
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]},
        "tokens_per_microbatch": 256,
    },
    "sft": {"steps": 30, "batch_size": 32, "optimizer": {"lr": 1e-2}},
    "trainer": {"steps": 4, "prompts_per_step": 8, "minibatches": 2, "eval_every": 2},
    "checkpoint": {"every": 1, "keep": 10},
    "logging": {"report": False},  # drawn once, by the run that is left to end
    "launch": {"processes": 2},
}


def write_recipe(folder: Path) -> Path:
    """The recipe above, with its run folder beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "run_dir": str(folder / "run")}, sort_keys=False))
    return path


class Job:
    """A running `megatron-rl` command with its ranks. `is_new`: of new processes, which a test of their start needs."""

    started: ClassVar[list[Job]] = []

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        command: str = "train",
        environment: Mapping[str, str] | None = None,
        is_new: bool = False,
    ) -> None:
        self.run_dir = folder / "run"
        given = ["-m", "megatron_rl", command, str(write_recipe(folder)), *arguments]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        self._terminal = Path(tempfile.mkdtemp(prefix="terminal-", dir=folder))
        self.process: Warm | subprocess.Popen[bytes]
        with (self._terminal / "stdout").open("wb") as out, (self._terminal / "stderr").open("wb") as err:
            if is_new:
                self.process = subprocess.Popen([sys.executable, *given], stdout=out, stderr=err, env=variables)
            else:
                self.process = Warm(given, variables, out, err)
        self.stdout = self.stderr = ""
        Job.started.append(self)

    @classmethod
    def end_all(cls) -> None:
        """Kills what still runs: jobs of tests that failed before they came to the end."""
        while cls.started:
            job = cls.started.pop()
            if job.process.poll() is None:
                job.kill()

    def ranks(self) -> dict[int, int]:
        """Rank -> process id of the ranks that run."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = {rank_of(int(child)): int(child) for child in children}
        return {rank: child for rank, child in found.items() if rank is not None}

    def wait_for(self, condition: Callable[[], bool], seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                self.finish()
                raise AssertionError(f"ended early with {self.process.returncode}:\n{self.stdout}\n{self.stderr}")
            assert time.monotonic() < deadline, "what was waited for did not come"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: any(row["step"] >= step for row in rows(self.run_dir)))

    def wait_for_checkpoint(self, step: int) -> None:
        self.wait_for((self.run_dir / "checkpoints" / f"step_{step}" / "manifest.json").exists)

    def finish(self, seconds: float = 600) -> int:
        """Waits for the end; the exit code. What was printed is in `stdout` and `stderr` then."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._read()
        return code

    def kill(self) -> None:
        """What a machine that goes down does to a run: SIGKILL to every process of it."""
        for pid in [self.process.pid, *self.ranks().values()]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._read()
        deadline = time.monotonic() + 120
        while left := processes_of(self.run_dir):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def _read(self) -> None:
        self.stdout, self.stderr = ((self._terminal / name).read_text() for name in ("stdout", "stderr"))

    def succeed(self) -> None:
        code = self.finish()
        assert code == 0, f"exit code {code}:\n{self.stdout}\n{self.stderr}"


def rank_of(pid: int) -> int | None:
    """A fork has its rank in its name, a new process in its environment; None of another process."""
    with contextlib.suppress(OSError):
        if (name := Path(f"/proc/{pid}/comm").read_text().strip()).startswith("rank "):
            return int(name.removeprefix("rank "))
    given = variable(pid, "RANK")
    return None if given is None else int(given)


def variable(pid: int, name: str) -> str | None:
    """An environment variable of another process."""
    try:
        found = re.search(rb"(?:^|\0)" + name.encode() + rb"=([^\0]*)", Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return None
    return found[1].decode() if found else None


def processes_of(run_dir: Path) -> list[int]:
    """Living processes that were started with this run folder."""
    alive = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                str(run_dir).encode() in (path / "cmdline").read_bytes()
                and "\nState:\tZ" not in (path / "status").read_text()
            ):
                alive.append(int(path.name))
        except OSError:
            continue
    return [pid for pid in alive if pid != os.getpid()]


def listening_at(pid: int) -> list[str]:
    """Addresses at which a process listens, without ports, from the kernel's tables of TCP sockets."""
    own = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(os.readlink(path))
    addresses = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:  # TCP_LISTEN
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(
                    words[i : i + 4][::-1] for i in range(0, len(words), 4)
                )  # 32-bit words, little-endian
                addresses.append(socket.inet_ntop(family, packed))
    return addresses


def state(pid: int) -> str:
    """A process's state as the kernel says it: T where it is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


# vLLM's collectives between the ranks of an engine on a CPU; on one without AVX-512 it takes gloo's.
HAS_SHARED_COLLECTIVES = torch.cpu._is_avx512_supported()


def segments(port: str | None) -> list[Path]:
    """Shared memory of the run whose ranks met at this port."""
    assert port is not None
    return list(SHARED_MEMORY.glob(f"megatron_rl-*{port}*"))


def mapped(pid: int) -> list[str]:
    """What a process has mapped under /dev/shm: names, `(deleted)` where a name is gone."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if str(SHARED_MEMORY) in line})


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Rows of the metrics file; a line that is being written does not count."""
    path = run_dir / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def samples(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples" / name).read_text().splitlines()]


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what depends on the clock and the machine."""
    return {
        key: value
        for key, value in row.items()
        if key != "time" and not key.startswith(("timing_s/", "perf/", "memory/", "checkpoint/", "reward_overlap/"))
    }
