"""The share of a job's time that failures and checkpoints leave."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Failures:
    """Exponentially distributed, independent of what the job does; seconds.

    Attributes:
        between: mean time between two failures of the whole job (a node's divided by the nodes).
        restart: from a failure to the first step of the next start.
        blocked: what training waits for a save (`checkpoint/blocked_s`).
        write: from then on until the checkpoint is whole (`checkpoint/write_s`), beside training; a failure before loses it.
    """

    between: float
    restart: float
    blocked: float
    write: float


def saves(seconds: np.ndarray, every: int, failures: Failures) -> tuple[np.ndarray, np.ndarray]:
    """When checkpoints are whole after a start, and the seconds of steps in each, float64 [checkpoints], ascending; up to the
    first with which `seconds`, of steps that are taken again and again, begin anew.

    A save that comes while another is written is put off: none come more often than a write takes.
    """
    every, count = apart(seconds, every, failures), len(seconds)
    number = np.arange(1, count // math.gcd(count, every) + 1)
    rounds, rest = np.divmod(every * number, count)
    held = rounds * seconds.sum() + np.concatenate([[0.0], seconds.cumsum()])[rest]
    return held + failures.blocked * number + failures.write, held


def goodput(seconds: np.ndarray, every: int, failures: Failures) -> float:
    """Expected share of the time in which steps are done that are not lost, over a long job.

    A start runs for an exponential time; what it leaves is what its last whole checkpoint holds (renewal-reward).
    """
    whole, held = saves(seconds, every, failures)
    gained = np.diff(held, prepend=0.0) @ np.exp(-whole / failures.between)
    later = held[-1] + failures.blocked * len(held)  # by so much are the saves whole that follow, round by round
    return float(gained / -math.expm1(-later / failures.between) / (failures.between + failures.restart))


def apart(seconds: np.ndarray, every: int, failures: Failures) -> int:
    """Steps between saves: at least as many as a write takes."""
    return max(every, math.ceil(failures.write / float(seconds.mean())))


@dataclass(frozen=True)
class CheckpointInterval:
    """Steps between checkpoints, and the goodput."""

    steps: int
    goodput: float


def intervals(seconds: np.ndarray, failures: Failures, most: int = 10_000) -> list[CheckpointInterval]:
    """Goodput over intervals from the shortest that the disk keeps up with to several times the best, about 10 to a factor of
    ten."""
    tried, tested, best = apart(seconds, 1, failures), list[CheckpointInterval](), 0.0
    while tried <= most or not tested:
        tested.append(CheckpointInterval(tried, goodput(seconds, tried, failures)))
        best = max(best, tested[-1].goodput)
        if tested[-1].goodput < 0.9 * best:
            break
        tried = max(tried + 1, round(tried * 1.25))
    return tested


def young(failures: Failures) -> float:
    """Young's interval (1974), seconds of work between two saves."""
    return math.sqrt(2 * failures.blocked * failures.between)


def daly(failures: Failures) -> float:
    """Daly's interval (2006, equation 37), seconds of work between two saves."""
    cost, between = failures.blocked, failures.between
    if cost >= 2 * between:
        return between
    ratio = cost / (2 * between)
    return math.sqrt(2 * cost * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
