"""What a run leaves behind when it ends badly: one folder, one file of facts and one of stacks per rank, one report.

`<run_dir>/postmortem/attempt_<k>/rank_<r>.json` has phase, step, samples, collectives and memory of a rank, `rank_<r>.txt`
the stacks of all its threads, `report.txt` what follows from all of them. Needs no torch: the launcher writes here too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.runtime.progress import BETWEEN, PROGRESS, beat_interval, read_heartbeat

REPORT = "report.txt"
STALL = "stall.json"  # written by the first rank that is past a deadline; its presence asks all others for their stacks
_SAMPLES = 64  # ids that are written; more tell nothing new


def folder_of(attempt: Path) -> Path:
    """`<run_dir>/logs/attempt_<k>` -> `<run_dir>/postmortem/attempt_<k>`."""
    return attempt.parent.parent / "postmortem" / attempt.name


def heartbeat_folder(attempt: Path) -> Path:
    return attempt / "heartbeat"


def write_rank(folder: Path, about: Mapping[str, Any], stacks: str) -> None:
    """This rank's two files. What its heartbeat says goes with it."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        **PROGRESS.record(),
        "samples": [*PROGRESS.samples][:_SAMPLES],
        "samples_in_all": len(PROGRESS.samples),
        "at": waiting_place(stacks),
        **about,
    }
    (folder / f"rank_{PROGRESS.rank}.txt").write_text(stacks, encoding="utf-8")
    temporary = folder / f".rank_{PROGRESS.rank}.json"
    temporary.write_text(json.dumps(facts, indent=1, default=str), encoding="utf-8")
    os.replace(temporary, folder / f"rank_{PROGRESS.rank}.json")  # whoever sees it sees all of it


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
    folder.mkdir(parents=True, exist_ok=True)
    content = {"rank": PROGRESS.rank, "phase": phase, "limit": limit, "why": why, "time": time.time()}
    temporary = folder / f".stall_{PROGRESS.rank}_{os.getpid()}"
    temporary.write_text(json.dumps(content), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, folder / STALL)
    temporary.unlink()


def stalled(folder: Path) -> dict[str, Any] | None:
    """What `mark_stall` wrote, if anyone has."""
    try:
        return json.loads((folder / STALL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------------------- verdicts
def dumped_ranks(folder: Path) -> dict[int, dict[str, Any]]:
    """Rank -> facts of every rank that has written its post-mortem."""
    found = {}
    for path in folder.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(path.read_text(encoding="utf-8"))
            found[facts["rank"]] = facts
    return dict(sorted(found.items()))


def verdict(
    stall: Mapping[str, Any],
    before: Mapping[int, Mapping[str, Any]],
    after: Mapping[int, Mapping[str, Any]],
    dumps: Mapping[int, Mapping[str, Any]],
    here: str,
) -> str:
    """Which rank is behind, where, and what the others wait in: the first line is the answer.

    A rank is silent if its heartbeat has not moved between `before` and `after` and it has not written a post-mortem. Silent
    ranks are the ones behind; where all answer, it is those that are not waiting in a collective that others have entered,
    then those that went through the fewest phases.

    Args:
        stall: what `mark_stall` wrote.
        before, after: heartbeats of all ranks, some beats apart.
        dumps: facts of the ranks that answer.
        here: name of the node that this is written on, whose processes can be looked at.
    """
    world = max((beat["world"] for beat in after.values()), default=0)
    silent = [
        rank for rank, beat in after.items() if rank not in dumps and beat["beat"] == before.get(rank, {}).get("beat")
    ]
    absent = [rank for rank in range(world) if rank not in after]
    facts = {rank: {**beat, **dumps.get(rank, {})} for rank, beat in after.items()}
    lines = []
    if silent or absent:
        lines += [
            f"{_who(facts[rank])} is behind: {where(facts[rank])}; {_state(facts[rank], here)}" for rank in silent
        ]
        lines += [f"rank {rank} is behind: it has not come as far as its first heartbeat" for rank in absent]
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
                    f"{_who(facts[rank])} is behind: {where(facts[rank])}; it answers and is at {facts[rank]['at']}"
                )
    others = [fact for rank, fact in facts.items() if rank in dumps and not any(_who(fact) in line for line in lines)]
    lines += [f"{names} {where}" for names, where in _together(others)]
    limit = f"{stall['limit'] / 60:g} min for `{stall['phase']}`"
    lines.append(stall["why"] or f"the deadline that passed: {limit}, on rank {stall['rank']} (recipe: watchdog)")
    return "\n    ".join(lines)


def _behind(facts: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Of ranks that all answer, those that the others wait for."""
    fewest = min(fact["entered"] for fact in facts.values())
    ranks = [rank for rank, fact in facts.items() if fact["entered"] == fewest]
    if len(ranks) == len(facts) and len(ranks) > 1:
        idle = [rank for rank in ranks if not facts[rank].get("pending")]
        return idle or ranks
    return ranks


def _who(fact: Mapping[str, Any]) -> str:
    return f"rank {fact['rank']} (node {fact['host']}, process {fact['pid']})"


def where(fact: Mapping[str, Any]) -> str:
    """Phase and step of a heartbeat, and for how long, in words."""
    return f"{place(fact)}, for {fact['time'] - fact['since']:.0f} s when last heard of"


def place(fact: Mapping[str, Any]) -> str:
    """Phase and step of a heartbeat."""
    phase = fact["phase"] if fact["phase"] == BETWEEN else f"in `{fact['phase']}`"
    step = f" of {fact['stage']} step {fact['step']}" if fact["stage"] else ""
    return f"{phase}{step}"


def _state(fact: Mapping[str, Any], here: str) -> str:
    """What can be said about a process that does not answer."""
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
    }.get(state, "it does not answer: something holds Python's lock; its stacks are in the file beside this report")


def _together(facts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
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
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


# ------------------------------------------------------------------------------------------------------ for the launcher
def past_deadline(attempt: Path, ranks: Iterable[int], grace: float) -> str | None:
    """A report on ranks that are so far past their deadline that nobody is left to say so; None while all is well.

    For whoever watches these ranks from outside, on their machine's own clock.
    """
    beats = [read_heartbeat(heartbeat_folder(attempt) / f"rank_{rank}.json") for rank in ranks]
    late = [(beat, time.time() - beat["deadline"]) for beat in beats if beat and beat["deadline"] is not None]
    # Ranks notice each other's stall, and tell it, in four beats.
    if not any(seconds > grace + 4 * beat_interval(beat["world"]) for beat, seconds in late):
        return None
    here = socket.gethostname()
    text = "\n    ".join(
        f"{_who(beat)} is behind: {where(beat)}; {_state(beat, here)}" for beat, seconds in late if seconds > 0
    )
    with contextlib.suppress(OSError):
        folder_of(attempt).mkdir(parents=True, exist_ok=True)
        (folder_of(attempt) / REPORT).write_text(f"the run stands still: {text}\n", encoding="utf-8")
    return text
