"""Numbers on the command line: readers for argparse, which refuse what cannot be, in words."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from megatron_rl.base.messages import LARGEST


def numbers(
    least: float, above: bool = True, most: int = 1, largest: float = LARGEST
) -> Callable[[str], tuple[float, ...]]:
    """Reads up to `most` numbers with commas between, each above `least` (or not below it) and at most `largest`."""

    def read(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(word) for word in text.split(","))
        except ValueError:
            values = ()
        if not 1 <= len(values) <= most or not all(map(math.isfinite, values)):
            raise argparse.ArgumentTypeError(f"{text!r} is no number")
        if any(value < least or (above and value == least) for value in values):
            raise argparse.ArgumentTypeError(f"must {'be above' if above else 'not be below'} {least:g}")
        if max(values) > largest:
            raise argparse.ArgumentTypeError(f"must not be above {largest:,}")
        return values

    return read


def number(least: float, above: bool = True, largest: float = LARGEST) -> Callable[[str], float]:
    return lambda text: numbers(least, above, largest=largest)(text)[0]
