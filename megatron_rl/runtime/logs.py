"""The end of a process's log, as it is shown where the process has failed."""

from __future__ import annotations

from collections import deque
from pathlib import Path

OWN_MESSAGE = "megatron-rl: "  # prefix of a rank's final message, where it knows why it ends
TAIL = 40  # lines of a failed rank's log that are shown


def end_of_log(path: Path) -> list[str]:
    """The rank's final message or traceback, where its log has one near the end; else the log's last lines."""
    lines = last_lines(path, 5 * TAIL)
    for sign in (OWN_MESSAGE, "Traceback (most recent call last)"):
        found = [number for number, line in enumerate(lines) if line.startswith(sign)]
        if found:
            return lines[found[-1] :][-TAIL:]
    return lines[-TAIL // 2 :]


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a log file, without their line ends."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n") for line in deque(file, maxlen=count)]
