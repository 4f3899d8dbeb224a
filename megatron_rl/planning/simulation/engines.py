"""Engines that draw responses: continuous batching, a cache that fills, prompts handed out as engines become free.

Nothing changes in an engine between two ends of sequences, so time advances by those, not by tokens.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 16  # tokens of vLLM's cache that a sequence takes at a time


@dataclass(frozen=True)
class EngineSpeed:
    """The abilities of one engine."""

    decode_seconds: Callable[[int, float], float]  # a pass over so many sequences, with so many tokens each in the mean
    prefill_seconds: Callable[[float], float]  # reading so many tokens
    cache_tokens: float
    max_concurrent: int  # sequences decoded together
    state_tokens: float = 0.0  # of the cache's, what a sequence takes whatever its tokens


@dataclass(frozen=True)
class SimulatedGeneration:
    """One phase of generation. Rows are groups in the order in which they were given."""

    seconds: float
    ends: np.ndarray  # float64 [groups, count]: seconds after the start; nan: not ended
    left: np.ndarray  # int64 [groups, count]: tokens still to be drawn
    busy: np.ndarray  # float64 [engines]: seconds with something to decode
    set_back: int  # times that a sequence gave its room in the cache to others, and was read again later
    running: Sequence[Sequence[tuple[float, int]]]  # of each engine: from when on it decodes how many sequences

    @property
    def idle_share(self) -> float:
        """Idle share of the engines' time."""
        return 1 - float(self.busy.mean()) / self.seconds if self.seconds else 0.0

    @property
    def tail_share(self) -> float:
        """Share of the phase after the time when 95 % of the responses that ended have ended."""
        ended = self.ends[~np.isnan(self.ends)]
        return 1 - float(np.quantile(ended, 0.95)) / self.seconds if ended.size and self.seconds else 0.0


class _Engine:
    """Its sequences by row (group * count + index). `time` and `passes` are those of its last event."""

    def __init__(
        self, speed: EngineSpeed, prompt: float, count: int, drawn: list[int], left: list[int], is_read: list[bool]
    ) -> None:
        self.speed, self.prompt, self.count = speed, prompt, count
        self.is_read = is_read  # by row: what was drawn before is in the cache
        self.drawn, self.left = drawn, left  # by row; shared by all engines
        self.time, self.busy, self.passes, self.cached, self.set_back = 0.0, 0.0, 0, 0.0, 0
        self.waiting: deque[int] = deque()
        self.ends_at: dict[int, int] = {}  # row -> the pass that ends it, the latest admitted last
        self._next: list[tuple[int, int]] = []  # heap of the same
        self.running: list[tuple[float, int]] = []
        self.segment = (0, 0.0)  # passes until its next event, and their seconds

    @property
    def pending(self) -> int:
        return len(self.ends_at) + len(self.waiting)

    def plan(self) -> None:
        """Admits what there is room for, and looks how long nothing will change."""
        running, read = len(self.ends_at), 0.0
        while self.waiting and running < self.speed.max_concurrent:
            row = self.waiting[0]
            tokens = self._cached(row)
            if running and self.cached + tokens + BLOCK * (running + 1) > self.speed.cache_tokens:
                break
            self.waiting.popleft()
            running += 1
            self.cached += tokens
            # The prompt of a group is read once: the others find it in the cache.
            if not self.is_read[row]:
                read += self.drawn[row] + (self.prompt if row % self.count == 0 else 0)
            self.ends_at[row] = self.passes + self.left[row]
            heapq.heappush(self._next, (self.ends_at[row], row))
        if read:
            self._wait(self.speed.prefill_seconds(read))
        self.running.append((self.time, running))
        if not running:
            self.segment = (0, 0.0)
            return
        while self.ends_at.get(self._next[0][1]) != self._next[0][0]:
            heapq.heappop(self._next)  # of one that was set back
        passes, room = self._next[0][0] - self.passes, self.speed.cache_tokens - self.cached
        if running > 1 and passes * running > room:
            passes = max(0, int(room // running))
        mean = self.cached / running - self.speed.state_tokens + (passes + 1) / 2
        self.segment = (passes, passes * self.speed.decode_seconds(running, mean) if passes else 0.0)

    def advance(self) -> list[int]:
        """Goes on to the next event, and returns the rows that have ended with it."""
        passes, seconds = self.segment
        self._wait(seconds)
        self.passes += passes
        self.cached += passes * len(self.ends_at)
        ended = []
        while self._next and self._next[0][0] <= self.passes:
            end, row = heapq.heappop(self._next)
            if self.ends_at.get(row) != end:
                continue
            del self.ends_at[row]
            self.drawn[row] += self.left[row]
            self.left[row] = 0
            self.cached -= self._cached(row)
            ended.append(row)
        if not ended:
            self._make_room()
        return ended

    def _cached(self, row: int) -> float:
        """Returns the room that a sequence has in the cache, in tokens."""
        return self.prompt + self.drawn[row] + self.speed.state_tokens

    def _make_room(self) -> None:
        """The sequences that came last give up their place, until each other one has room for a block."""
        while len(self.ends_at) > 1 and self.cached + BLOCK * len(self.ends_at) > self.speed.cache_tokens:
            row, end = self.ends_at.popitem()
            self._stop(row, end)
            self.cached -= self._cached(row)
            self.waiting.appendleft(row)
            self.is_read[row] = False
            self.set_back += 1

    def _stop(self, row: int, end: int) -> None:
        left = max(1, end - self.passes)
        self.drawn[row] += self.left[row] - left
        self.left[row] = left

    def _wait(self, seconds: float) -> None:
        self.time += seconds
        self.busy += seconds


def generate(
    speed: EngineSpeed,
    engines: int,
    prompt: float,
    drawn: np.ndarray,
    left: np.ndarray,
    order: Sequence[int],
    read_before: np.ndarray | None = None,
) -> SimulatedGeneration:
    """Responses to prompts of `prompt` tokens, handed out as `rollout/dispatch.py` does it.

    Args:
        drawn: int64 [groups, count], tokens that were drawn before; they are read again.
        left: int64 [groups, count], tokens to be drawn; 0: the response is whole.
        order: groups in the order in which they are begun.
        read_before: bool [groups], those whose tokens so far are in the cache; None: none are.

    Raises:
        ValueError: the cache does not hold the longest sequence.
    """
    groups, count = left.shape
    longest = prompt + float((drawn + left).max()) + speed.state_tokens
    if longest > speed.cache_tokens:
        raise ValueError(
            f"an engine's cache of {speed.cache_tokens:,.0f} tokens does not hold a sequence of {longest:,.0f}"
        )
    rest, before = left.ravel().tolist(), drawn.ravel().tolist()
    is_read = [False] * len(rest) if read_before is None else np.repeat(read_before, count).tolist()
    workers = [_Engine(speed, prompt, count, before, rest, is_read) for _ in range(engines)]
    handed_out = _hand_out_first(workers, order, count)
    ends = np.full(groups * count, np.nan)
    ends[left.ravel() == 0] = 0.0
    events: list[tuple[float, int]] = []

    def schedule(number: int) -> None:
        workers[number].plan()
        if workers[number].ends_at:
            heapq.heappush(events, (workers[number].time + workers[number].segment[1], number))

    for number in range(engines):
        schedule(number)
    now = 0.0
    while events:
        now, number = heapq.heappop(events)
        worker = workers[number]
        for row in worker.advance():
            ends[row] = now
        while handed_out < len(order) and worker.pending < speed.max_concurrent:
            worker.waiting.extend(_rows(order[handed_out], count, rest))
            handed_out += 1
        schedule(number)
    return SimulatedGeneration(
        seconds=now,
        ends=ends.reshape(groups, count),
        left=np.array(rest, dtype=np.int64).reshape(groups, count),
        busy=np.array([worker.busy for worker in workers]),
        set_back=sum(worker.set_back for worker in workers),
        running=[worker.running for worker in workers],
    )


def joined(phases: Sequence[SimulatedGeneration]) -> SimulatedGeneration:
    """Phases one after the other, over the same responses, as one: a response ends with the last phase that drew it."""
    begins = np.cumsum([0.0, *(phase.seconds for phase in phases)])
    ends = np.zeros_like(phases[0].ends)
    for begin, phase in zip(begins.tolist(), phases, strict=False):
        ends = np.where(phase.ends > 0, begin + phase.ends, ends)
    return SimulatedGeneration(
        seconds=float(begins[-1]),
        ends=np.where(phases[-1].left == 0, ends, np.nan),
        left=phases[-1].left,
        busy=np.sum([phase.busy for phase in phases], axis=0),
        set_back=sum(phase.set_back for phase in phases),
        running=[
            [
                (begin + time, number)
                for begin, phase in zip(begins.tolist(), phases, strict=False)
                for time, number in phase.running[i]
            ]
            for i in range(len(phases[0].running))
        ],
    )


def _hand_out_first(workers: Sequence[_Engine], order: Sequence[int], count: int) -> int:
    """Each engine begins with an even share of the groups, as many as it decodes at a time. Returns how many that are."""
    engines, at_once = len(workers), -(-workers[0].speed.max_concurrent // count)
    given = len(order) if engines == 1 else min(len(order), at_once * engines)
    for number, worker in enumerate(workers):
        for group in order[:given][number::engines]:
            worker.waiting.extend(_rows(group, count, worker.left))
    return given


def _rows(group: int, count: int, left: Sequence[int]) -> list[int]:
    return [row for row in range(group * count, (group + 1) * count) if left[row]]
