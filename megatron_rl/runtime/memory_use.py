"""Memory: the peak of every phase, what holds it now, and what to do when it runs out."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

GIB = 2**30
# What torch, Python, C++ and vLLM say when memory is out. torch has a class of its own only for the device's.
_SIGNS = re.compile(
    r"out of memory|can't allocate memory|not enough memory|std::bad_alloc|Cannot allocate memory|"
    r"No available memory for the cache blocks|less than desired GPU memory utilization|"
    r"KV cache .* is larger than the available"
)


class PhaseMemory:
    """Peaks of host and device memory per phase, in GiB. Phases nest: an outer one has its inner ones' peaks too."""

    def __init__(self) -> None:
        self.peaks: dict[str, dict[str, float]] = {}  # since `start`, or `metrics`
        self.highest: dict[str, dict[str, float]] = {}  # since the start
        self.overall: dict[str, float] = {}
        self._open: list[dict[str, float]] = [{}]

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._note()
        self._open.append({})
        try:
            yield
        finally:
            self._note()
            done = self._open.pop()
            _raise_to(self.peaks.setdefault(phase, {}), done)
            _raise_to(self.highest.setdefault(phase, {}), done)
            _raise_to(self._open[-1], done)

    def _note(self) -> None:
        """Attributes the peak since the last call to the innermost phase."""
        peak = peak_since_reset()
        _raise_to(self._open[-1], peak)
        _raise_to(self.overall, peak)
        reset_peak()

    def start(self) -> None:
        """A step begins: peaks per phase are its own from here on."""
        self._note()
        self.peaks = {}

    def metrics(self) -> dict[str, float]:
        """`memory/host_peak_gib`, `memory/device_peak_gib` since the start, and the same per phase since the last call."""
        self._note()
        values = {"memory/host_peak_gib": self.overall["host"]}
        if "device" in self.overall:
            values["memory/device_peak_gib"] = self.overall["device"]
        for phase, peaks in self.peaks.items():
            values[f"memory/{phase}/host_peak_gib"] = peaks["host"]
            if "device" in peaks:
                values[f"memory/{phase}/device_peak_gib"] = peaks["device"]
        self.peaks = {}
        return values


def _raise_to(peaks: dict[str, float], others: Mapping[str, float]) -> None:
    for where, value in others.items():
        peaks[where] = max(peaks.get(where, 0.0), value)


def _status(name: str) -> float:
    """A field of /proc/self/status, in GiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) / 2**20 if found else 0.0


@functools.cache
def _can_reset_host_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_since_reset() -> dict[str, float]:
    import torch

    peak = {"host": _status("VmHWM")}
    if torch.cuda.is_available():
        peak["device"] = torch.cuda.max_memory_allocated() / GIB
    return peak


def reset_peak() -> None:
    """Starts both peaks anew. A kernel that does not allow it for the host leaves that one at its peak since the start."""
    import torch

    if _can_reset_host_peak():
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def host_in_use() -> float:
    """Host memory in use by this process, in GiB."""
    return _status("VmRSS")


def in_use() -> dict[str, float]:
    """Memory in use now, in GiB: this process's on host and device, and the whole device's. In any thread: nothing here
    may be the first use of a device, which takes room on it."""
    import torch

    from megatron_rl.runtime import device

    now = {"host, this process": host_in_use()}
    if torch.cuda.is_initialized():
        own = device.index()
        free, total = torch.cuda.mem_get_info(own)
        now |= {
            "device, this process's tensors": torch.cuda.memory_allocated(own) / GIB,
            "device, reserved by torch": torch.cuda.memory_reserved(own) / GIB,
            "device, all processes": (total - free) / GIB,
            "device, in all": total / GIB,
        }
    return now


def oom_kills(
    membership: Path = Path("/proc/self/cgroup"),
    groups: Path = Path("/sys/fs/cgroup"),
    machine: Path = Path("/proc/vmstat"),
) -> int:
    """How often the kernel has killed a process of this container or job for its memory; 0 where it does not tell.

    A container sees its own cgroup as the root; a job of a batch system is some levels below, and not every level counts.
    Without a cgroup that counts, the machine's own number is taken (/proc/vmstat).
    """
    with contextlib.suppress(OSError):
        for folder, version in cgroups(membership, groups):
            if (kills := _oom_kill(folder / ("memory.events" if version == 2 else "memory.oom_control"))) is not None:
                return kills
    return _oom_kill(machine) or 0


def cgroups(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[Path, int]]:
    """Folders of this process's memory cgroups, each before those that it is in, with the version of cgroups (1 or 2)."""
    for hierarchy, controllers, path in re.findall(r"^(\d+):(.*?):/(.*)$", own.read_text(), re.MULTILINE):
        if hierarchy == "0" or "memory" in controllers.split(","):
            base, version = (root, 2) if hierarchy == "0" else (root / "memory", 1)
            inside = PurePath(path)  # which a container may not see: there, its own is the base
            yield from ((base / place, version) for place in (inside, *inside.parents))


def _oom_kill(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or what caused it, says that memory ran out."""
    import torch

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(cause, (RuntimeError, ValueError, OSError)) and _SIGNS.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def table(parts: Mapping[str, float], now: Mapping[str, float], peaks: Mapping[str, Mapping[str, float]]) -> str:
    """A line each for what holds memory, what is in use now, and the peak of every phase, in GiB."""
    rows = [*parts.items(), *((f"in use, {name}", value) for name, value in now.items())]
    rows += [(f"peak in {phase}, {where}", value) for phase, both in peaks.items() for where, value in both.items()]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}} {value:8.2f}" for name, value in rows)
