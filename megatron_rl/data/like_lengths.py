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
    """Says between two steps which prompts come next.

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
        """Returns the state before anything is drawn. `ids`: of the training prompts."""
        return cls(_digest(ids), np.full(len(ids), np.nan))

    def next_step(
        self, take: Callable[[int, int], list[int]], position: int, count: int, steps: int, seed: int
    ) -> tuple[list[int], LikeLengths, int]:
        """Returns a step's prompts, the state without them, and the position in the order behind all that were taken.

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
        """Adds the mean tokens of what was drawn, by prompt."""
        known = self.means.copy()
        known[list(means)] = list(means.values())
        return replace(self, means=known)

    def pack(self) -> bytes:
        """Returns the checkpoint file's content."""
        file = io.BytesIO()
        prompts, queue = np.frombuffer(self.prompts, dtype=np.uint8), np.array(self.queue, dtype=np.int64)
        np.savez(file, prompts=prompts, means=self.means, queue=queue)
        return file.getvalue()

    @classmethod
    def unpack(cls, content: bytes, ids: Sequence[str]) -> LikeLengths:
        """Undoes `pack`. ValueError where the training prompts are no longer those."""
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            saved = cls(file["prompts"].tobytes(), file["means"], tuple(file["queue"].tolist()))
        known = len(saved.means) == len(ids) and all(0 <= place < len(ids) for place in saved.queue)
        if saved.prompts != _digest(ids) or not known:
            raise ValueError("prompts that come next wait in it, and the training prompts are no longer those it has")
        return saved


def of_like_lengths(block: Sequence[int], means: np.ndarray, count: int) -> list[list[int]]:
    """Divides a block's prompts, a multiple of `count`, into steps of `count`: those with long responses share one. Within a
    step they keep the block's order.

    Where no length is known the block stays as it is; else a prompt without one counts as the median. A prompt that comes
    twice comes in different steps, where there are enough.

    Args:
        means: float64 [training prompts], mean response tokens; NaN where unknown.
    """
    known = means[list(block)]
    steps = len(block) // count
    if np.isnan(known).all():
        return [list(block[at : at + count]) for at in range(0, len(block), count)]
    known = np.where(np.isnan(known), np.nanmedian(known), known)
    by_step = [list[int]() for _ in range(steps)]  # places in the block
    prompts = [set[int]() for _ in range(steps)]
    for place in np.argsort(-known, kind="stable").tolist():
        with_room = [step for step in range(steps) if len(by_step[step]) < count]
        step = next((step for step in with_room if block[place] not in prompts[step]), None)
        if step is None:  # all with room have the prompt
            step = with_room[0]
            place = _changed_places(by_step, prompts, place, block, step)
        by_step[step].append(place)
        prompts[step].add(block[place])
    return [[block[place] for place in sorted(places)] for places in by_step]


def _changed_places(
    by_step: list[list[int]], prompts: list[set[int]], place: int, block: Sequence[int], step: int
) -> int:
    """Swaps a place into the nearest full step without its prompt. Returns the place that moves to `step` in exchange, or
    `place` itself where no swap is possible."""
    for full in reversed(range(step)):
        if block[place] in prompts[full]:
            continue
        for index, other in reversed([*enumerate(by_step[full])]):
            if block[other] not in prompts[step]:
                by_step[full][index] = place
                prompts[full] = {block[each] for each in by_step[full]}
                return other
    return place


def _digest(ids: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(ids).encode(), digest_size=16).digest()
