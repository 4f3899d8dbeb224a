"""The post-mortem of a failed run: one folder, one file of facts and one of stacks per rank, one report.

`<run_dir>/postmortem/attempt_<k>/rank_<r>.json` has phase, step, samples, collectives and memory of a rank, `rank_<r>.txt`
the stacks of all its threads, `report.txt` what follows from all of them. Needs no torch: the launcher writes here too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from megatron_rl.runtime import disk, process
from megatron_rl.runtime.heartbeat import BETWEEN, HEARTBEAT, Beat, Dump

REPORT = "report.txt"
# Makes a rank write its stacks at once, from C and without Python's lock, to `stacks_file`. That walks the frames of running
# threads and may crash the process: it is sent only to a rank that the sender is about to end. A real-time signal, because
# batch systems and people send the others.
STACKS_SIGNAL = signal.SIGRTMIN + 7
STALL = "stall.json"  # written by the first rank that is past a deadline; its presence asks all others for their stacks
_SAMPLES = 64  # ids that are written; more tell nothing new
_STACKS_SECONDS = 1.0  # for a rank that does not answer to write its stacks


class Stall(TypedDict):
    """The first deadline that passed: `stall.json`."""

    rank: int
    phase: str
    limit: float  # seconds
    why: str  # in place of the deadline
    time: float


def folder_of(attempt: Path) -> Path:
    """`<run_dir>/logs/attempt_<k>` -> `<run_dir>/postmortem/attempt_<k>`."""
    return attempt.parent.parent / "postmortem" / attempt.name


def make_folder(folder: Path) -> None:
    """Makes the folder of a post-mortem, in a run folder that is there.

    Raises:
        OSError: among them FileNotFoundError, where the run folder was removed or renamed.
    """
    disk.make_inside(folder.parent.parent, folder)


def heartbeat_folder(attempt: Path) -> Path:
    return attempt / "heartbeat"


def stacks_file(beats: Path, rank: int) -> Path:
    """Where a rank that does not answer leaves its stacks, beside its heartbeat."""
    return beats / f"rank_{rank}.stacks"


def take_stacks(folder: Path, beats: Path, silent: Iterable[Beat]) -> None:
    """Makes the `silent` ranks of this machine write their stacks, and copies them into the post-mortem's folder."""
    dumps = [
        stacks_file(beats, beat["rank"])
        for beat in silent
        if process.send(beat["pid"], beat["started"], beat["space"], STACKS_SIGNAL)
    ]
    until = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < until and not all(path.is_file() and path.stat().st_size for path in dumps):
        time.sleep(0.05)
    time.sleep(0.1 if dumps else 0.0)  # one that has begun is finished
    for path in dumps:
        if path.is_file() and path.stat().st_size:  # a process that is stopped, or waits in the kernel, writes none
            shutil.copyfile(path, folder / f"{path.stem}.txt")


def write_rank(folder: Path, about: Mapping[str, object], stacks: str) -> None:
    """This rank's two files. What its heartbeat says goes with it."""
    make_folder(folder)
    facts = {
        **HEARTBEAT.record(),
        "samples": [*HEARTBEAT.samples][:_SAMPLES],
        "samples_in_all": len(HEARTBEAT.samples),
        "at": waiting_place(stacks),
        **about,
    }
    (folder / f"rank_{HEARTBEAT.rank}.txt").write_text(stacks, encoding="utf-8", errors="backslashreplace")
    disk.replace(folder / f"rank_{HEARTBEAT.rank}.json", json.dumps(facts, indent=1, default=str))


def waiting_place(stacks: str) -> str:
    """Where the main thread is: its innermost frame, and the innermost of this package where that is another one.

    `stacks` as faulthandler writes them: threads, most recent call first, the main thread last.
    """
    main = re.split(r"[Tt]hread 0x", stacks)[-1]
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)
    places = [f"{_short(name)}:{number} in {function}" for name, number, function in frames]
    own = [place for place, (name, *_) in zip(places, frames, strict=True) if "megatron_rl/" in name]
    if not places:
        return "an unknown place"
    return places[0] if not own or own[0] == places[0] else f"{places[0]}, called from {own[0]}"


def _short(name: str) -> str:
    for root in ("site-packages/", "megatron_rl/"):
        if root in name:
            return name[name.rindex(root) :].removeprefix("site-packages/")
    return name


def mark_stall(folder: Path, phase: str, limit: float, why: str = "") -> None:
    """Says that a deadline has passed. The first to say so is believed."""
    make_folder(folder)
    content = {"rank": HEARTBEAT.rank, "phase": phase, "limit": limit, "why": why, "time": time.time()}
    temporary = folder / f".stall_{HEARTBEAT.rank}_{os.getpid()}"
    temporary.write_text(json.dumps(content), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, folder / STALL)
    temporary.unlink()


def stalled(folder: Path) -> Stall | None:
    """The content of `mark_stall`'s file; None without one."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / STALL).read_text(encoding="utf-8"))
    return None


# ------------------------------------------------------------------------------------------------------------- verdicts
def dumped_ranks(folder: Path) -> dict[int, Dump]:
    """Rank -> facts of every rank that has written its post-mortem."""
    found = {}
    for path in folder.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(path.read_text(encoding="utf-8"))
            found[facts["rank"]] = facts
    return dict(sorted(found.items()))


def silent_ranks(before: Mapping[int, Beat], after: Mapping[int, Beat], dumps: Iterable[int]) -> list[int]:
    """Ranks that do not answer: no beat between two looks, and no post-mortem of their own."""
    common = after.keys() & before.keys()
    return [rank for rank in sorted(common - {*dumps}) if after[rank]["beat"] == before[rank]["beat"]]


def verdict(
    stall: Stall, before: Mapping[int, Beat], after: Mapping[int, Beat], dumps: Mapping[int, Dump], here: str
) -> str:
    """Which rank is behind, where, and what the others wait in: the first line is the answer.

    Silent ranks (`silent_ranks`) are the ones behind; where all answer, it is those that are not waiting in a collective that
    others have entered, then those that went through the fewest phases.

    Args:
        stall: what `mark_stall` wrote.
        before, after: heartbeats of all ranks, some beats apart.
        dumps: facts of the ranks that answer.
        here: name of the node that this is written on, whose processes can be looked at.
    """
    world = max((beat["world"] for beat in after.values()), default=0)
    silent = silent_ranks(before, after, dumps)
    absent = [rank for rank in range(world) if rank not in after]
    facts = {rank: dumps.get(rank) or Dump(**beat) for rank, beat in after.items()}
    lines = []
    if silent or absent:
        lines += [
            f"{who(facts[rank])} is behind: {where(facts[rank])}; {state_of(facts[rank], here)}" for rank in silent
        ]
        lines += [f"rank {rank} is behind: no heartbeat yet: it died or hung during start-up" for rank in absent]
    else:
        behind = _behind(facts)
        if len(behind) == len(facts):
            lines.append(
                f"no rank is behind: all {len(facts)} answer and are {where(next(iter(facts.values())))}. Either the work "
                "takes longer than its deadline, or a collective does not get through (network)"
            )
        else:
            for rank in behind:
                lines.append(
                    f"{who(facts[rank])} is behind: {where(facts[rank])}; it answers and is at {facts[rank]['at']}"
                )
    others = [fact for rank, fact in facts.items() if rank in dumps and not any(who(fact) in line for line in lines)]
    lines += [f"{names} {where}" for names, where in _together(others)]
    limit = f"{stall['limit'] / 60:g} min for `{stall['phase']}`"
    lines.append(stall["why"] or f"the deadline that passed: {limit}, on rank {stall['rank']} (recipe: watchdog)")
    return "\n    ".join(lines)


def _behind(facts: Mapping[int, Beat]) -> list[int]:
    """Ranks that the others wait for, where all answer. With split placement those of one role wait for the other's."""
    facts = {rank: fact for rank, fact in facts.items() if fact["phase"] != "wait"} or facts
    fewest = min(fact["entered"] for fact in facts.values())
    ranks = [rank for rank, fact in facts.items() if fact["entered"] == fewest]
    if len(ranks) == len(facts) and len(ranks) > 1:
        idle = [rank for rank in ranks if not facts[rank].get("pending")]
        return idle or ranks
    return ranks


def who(fact: Beat) -> str:
    return f"rank {fact['rank']} (node {fact['host']}, process {fact['pid']})"


def where(fact: Beat) -> str:
    """Phase and step of a heartbeat, and for how long, in words."""
    return f"{place(fact)}, for {fact['seconds']:.0f} s at its last heartbeat"


def place(fact: Beat) -> str:
    """Phase and step of a heartbeat."""
    phase = fact["phase"] if fact["phase"] == BETWEEN else f"in `{fact['phase']}`"
    step = f" of {fact['stage']} step {fact['step']}" if fact["stage"] else ""
    return f"{phase}{step}"


def state_of(fact: Beat, here: str) -> str:
    """The state of a process that does not answer, in words."""
    if fact["host"] != here:
        return "it does not answer: its node or its process is stopped, dead or cut off"
    try:
        with open(f"/proc/{fact['pid']}/stat", encoding="utf-8") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "its process is gone"
    return {
        "T": "it does not answer: its process is stopped (SIGSTOP, or a debugger)",
        "D": "it does not answer: its process waits in the kernel (a file system or a driver)",
        "Z": "its process has ended",
    }.get(state, "it does not answer: something holds the GIL; its stacks are in the file beside this report")


def _together(facts: Sequence[Beat]) -> list[tuple[str, str]]:
    """Ranks that wait in the same place, in one entry."""
    groups: dict[str, list[int]] = {}
    for fact in facts:
        pending = f" ({fact['pending']})" if fact.get("pending") else ""
        phase = fact["phase"] if fact["phase"] == BETWEEN else f"in `{fact['phase']}`"
        step = f" of step {fact['step']}" if fact["stage"] else ""
        groups.setdefault(f"{phase}{step}{pending}", []).append(fact["rank"])
    return [
        (f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {_ranges(ranks)} wait", place)
        for place, ranks in groups.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in runs)
