"""A walk on a line with Gymnasium's interface, which can fail in every way; it imports the standard library only."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any


class Walk:
    """A turn of odd length is a step to the right, any other one to the left; and the ground slips. It ends behind the edge
    of the line, and is cut after some steps. A step is worth where it leads.

    Args:
        latency: seconds that a call takes at most, drawn anew each time.
        how: it fails at its second step: raise, hang, die, flood, print, nonsense.
        of: the walks that fail, by the remainder of their seed to 3.
    """

    def __init__(self, steps: int = 3, latency: float = 0.0, how: str = "", of: int = 0) -> None:
        if steps < 1:
            raise ValueError("steps must be at least 1")
        self._most, self._latency, self._how, self._of = steps, latency, how, of

    def reset(self, *, seed: int) -> Any:
        self._ground, self._steps = random.Random(seed), 0
        self._at = self._ground.randrange(8)
        self._fails = seed % 3 == self._of
        return f"at {self._at}.", {}

    def step(self, action: str) -> Any:
        time.sleep(random.uniform(0.0, self._latency))
        self._steps += 1
        if self._steps == 2 and self._fails:
            self._fail()
            if self._how == "nonsense":
                return "at 0."
        self._at += (1 if len(action) % 2 else -1) + self._ground.randrange(-1, 2)
        return f"at {self._at}.", self._at / 4, not 0 <= self._at < 9, self._steps == self._most, {}

    def _fail(self) -> None:
        if self._how == "raise":
            raise KeyError("the map")
        if self._how == "hang":
            time.sleep(60.0)
        if self._how == "die":
            os._exit(3)
        if self._how == "flood":
            os.write(1, b"x" * 10**7)
        if self._how == "print":
            print('{"observation": "elsewhere"}', flush=True)

    def close(self) -> None:
        self._at = -1


class Echo:
    """Tells what it has heard, twice."""

    def reset(self, *, seed: int) -> Any:
        self._heard = 0
        return "go on", {}

    def step(self, action: str) -> Any:
        self._heard += 1
        return f"heard {action}", 1.0, False, self._heard == 2, {}


class Surroundings:
    """Tells what it has inherited: variables of the trainer's, by name, and folders in which Python looks for modules."""

    def reset(self, *, seed: int) -> Any:
        names = sorted(name for name in os.environ if name.startswith(("PYTHON", "LOCAL_RANK", "CUDA", "OF_A_USER")))
        return " ".join([*names, *(folder for folder in sys.path if folder.endswith("tasks"))]), {}

    def step(self, action: str) -> Any:
        raise NotImplementedError
