"""How many groups dynamic sampling draws at once. Imports no torch, so that `plan --simulate` goes by the same rule."""

from __future__ import annotations

import math


def groups_to_draw(needed: int, drawn: int, with_signal: int) -> int:
    """Groups of which `needed` will have a signal (49 times in 50), by the share that had one among those `drawn` before; as
    many as are needed where none had."""
    if not with_signal:
        return needed
    share = with_signal / drawn
    # Draws until the n-th success have the variance n (1 - p) / p², and p is known by `with_signal` successes.
    variance = needed * (1 + needed / with_signal) * (1 - share)
    return math.ceil((needed + 2 * math.sqrt(variance)) / share)
