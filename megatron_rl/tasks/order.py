"""The order in which prompts are visited."""

from __future__ import annotations

import random


class PromptOrder:
    """An endless shuffled order over `num_samples` prompts, a fresh shuffle per epoch.

    A pure function of (seed, position): the position is all the state there is, so a checkpoint stores one integer, and
    every process that asks for the same positions gets the same prompts.

    Args:
        num_samples: prompts in one epoch, at least 1.
        seed: any integer.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"an order needs at least one prompt, not {num_samples}")
        self.num_samples = num_samples
        self.seed = seed
        self._epoch = -1
        self._shuffled: list[int] = []

    def take(self, position: int, count: int) -> list[int]:
        """Indices of the `count` prompts from `position` on (0: the first of the first epoch), across epochs."""
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative, not {position} and {count}")
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(position + len(taken), self.num_samples)
            taken += self._permutation(epoch)[offset : offset + count - len(taken)]
        return taken

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            shuffled = list(range(self.num_samples))
            # Seeded by text, so that neighbouring seeds and epochs have nothing in common.
            random.Random(f"prompt order, seed {self.seed}, epoch {epoch}").shuffle(shuffled)
            self._epoch, self._shuffled = epoch, shuffled
        return self._shuffled
