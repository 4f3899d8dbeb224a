"""Steps of like lengths: of the prompts of some steps, those whose last responses were about as long share one.

A step is over when its longest response is, so steps whose responses all are long, and others whose are all short, take less
time than as many mixed ones. Over the steps of a block the same prompts are trained on as without it, in another order.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

LENGTHS = "lengths.npz"  # a checkpoint's file


@dataclass(frozen=True)
class LikeLengths:
    """What steps of like lengths go by, between two steps.

    Attributes:
        prompts: digest of the training prompts' ids.
        means: float64 [training prompts], tokens of the last responses to each; NaN where none was drawn yet.
        queue: indices of the training prompts that were taken, step by step, and are not drawn yet.
    """

    prompts: bytes
    means: np.ndarray
    queue: tuple[int, ...] = ()

    @classmethod
    def unknown(cls, ids: Sequence[str]) -> LikeLengths:
        """Before anything is drawn. `ids`: of the training prompts."""
        return cls(_digest(ids), np.full(len(ids), np.nan))

    def next_step(
        self, take: Callable[[int, int], list[int]], position: int, count: int, steps: int, seed: int
    ) -> tuple[list[int], LikeLengths, int]:
        """A step's prompts, what is left, and the position behind all that were taken.

        Args:
            take: the order of the training prompts, by position and number.
            count: prompts of a step.
            steps: of a block; 1: as they come, once the queue is used up.
        """
        queue = list(self.queue)
        while len(queue) < count:
            block = take(position, count * steps)
            by_step = of_like_lengths(block, self.means, count)
            if not np.isnan(self.means[block]).all():  # else every block would begin with its longest responses
                random.Random(f"like lengths, seed {seed}, position {position}").shuffle(by_step)
            queue += [place for step in by_step for place in step]
            position += len(block)
        return queue[:count], replace(self, queue=tuple(queue[count:])), position

    def learned(self, means: Mapping[int, float]) -> LikeLengths:
        """With what was drawn since, tokens by prompt."""
        known = self.means.copy()
        known[list(means)] = list(means.values())
        return replace(self, means=known)

    def pack(self) -> bytes:
        """A file's content."""
        file = io.BytesIO()
        arrays = {"prompts": np.frombuffer(self.prompts, dtype=np.uint8), "means": self.means}
        np.savez(file, **arrays, queue=np.array(self.queue, dtype=np.int64))
        return file.getvalue()

    @classmethod
    def unpack(cls, content: bytes, ids: Sequence[str]) -> LikeLengths:
        """Undoes `pack`. ValueError where the training prompts are no longer those."""
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            saved = cls(file["prompts"].tobytes(), file["means"], tuple(file["queue"].tolist()))
        if saved.prompts != _digest(ids):
            raise ValueError("prompts that come next wait in it, and the training prompts are no longer those it has")
        return saved


def of_like_lengths(block: Sequence[int], means: np.ndarray, count: int) -> list[list[int]]:
    """The prompts of a block in steps of `count`, those with long responses together; within a step in the block's order.

    Where none is known the block stays as it is. One of which nothing is known counts as one in the middle. A prompt that
    comes twice comes in different steps, where there are any.
    """
    known = means[list(block)]
    steps = -(-len(block) // count)
    if np.isnan(known).all():
        return [list(block[at : at + count]) for at in range(0, len(block), count)]
    known = np.where(np.isnan(known), np.nanmedian(known), known)
    by_step = [list[int]() for _ in range(steps)]  # places in the block
    for place in np.argsort(-known, kind="stable").tolist():
        _add(by_step, place, block, count)
    return [[block[place] for place in sorted(places)] for places in by_step]


def _add(by_step: list[list[int]], place: int, block: Sequence[int], count: int) -> None:
    """Adds a place to the first step with room that has not its prompt; where all with room have it, it changes places with
    the nearest in a full step."""

    def has(step: int, prompt: int) -> bool:
        return any(block[other] == prompt for other in by_step[step])

    with_room = [step for step, places in enumerate(by_step) if len(places) < count]
    free = [step for step in with_room if not has(step, block[place])]
    if free:
        by_step[free[0]].append(place)
        return
    last = with_room[0]
    for full in reversed([step for step in range(last) if not has(step, block[place])]):
        for index in reversed(range(count)):
            if not has(last, block[by_step[full][index]]):
                by_step[full][index], place = place, by_step[full][index]
                by_step[last].append(place)
                return
    by_step[last].append(place)


def _digest(ids: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(ids).encode(), digest_size=16).digest()
