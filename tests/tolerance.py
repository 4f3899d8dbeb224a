"""How far two computations of one quantity in float32 may be apart: by arithmetic, not by what one machine has shown.

Layouts, packings and CPUs add in different orders, so they round differently. A number of the tests' models has behind it, in
two updates, about 6 layers x 4 products x 80 terms x 3 (forward, and backward to inputs and weights) x 2 = 11,500 roundings
of 2^-24 each. Their signs are random, so they add up by their root (Higham and Mary 2019, "A new approach to probabilistic
rounding error analysis"), and both computations have them: sqrt(2 x 11,500) 2^-24 = 9e-6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

RELATIVE = 1e-5
# A log-prob is right up to RELATIVE times its own size, in nats: tokens drawn from these models have 3 to 6, log(61) is 4.1.
LOG_PROB = 5 * RELATIVE
# Of a mean of terms of either sign around 1, which may be near 0 itself. There are at least 100 terms, whose errors cancel
# by the root of their number.
SIGNED_MEAN = RELATIVE / 10

# Times all of these for a model with gated-delta layers, which read token after token: behind the last of 26 tokens (the mean
# in the layouts' test) their rule has 3 products x 8 terms x 26 more than a layer's 4 x 80. sqrt((320 + 624) / 320) = 1.7.
GATED_DELTA = 1.7

_COUNTED = re.compile(r"(region_share|experts)/.*|.*_share|actor/(updates|lr)|.*accuracy|.*tokens")
_ONE_TOKEN = re.compile(r"ratio/max|region_weight/.*")


def close(name: str, value: float, times: float = 1.0) -> Any:
    """What a metric's value in another layout, packing or number of processes has to equal.

    - Numbers of tokens, of choices made and shares of them are exact; an effective share of the sample (of weights) is not.
    - A ratio of probabilities is exp of a difference of log-probs: its relative error is their absolute one. The largest
      ratio is one token's, a region may have a single token.
    - All others are means or norms over many tokens.
    """
    if _COUNTED.fullmatch(name) and name != "correction/effective_sample_share":
        return pytest.approx(value, rel=1e-12)
    if _ONE_TOKEN.fullmatch(name):
        return pytest.approx(value, rel=times * LOG_PROB)
    return pytest.approx(value, rel=times * RELATIVE, abs=times * SIGNED_MEAN)


def differing(own: Mapping[str, float], want: Mapping[str, float], times: float = 1.0) -> list[str]:
    """Names of metrics that are not close, or that only one of the two has."""
    return sorted(name for name in own.keys() | want.keys() if not _both_close(name, own, want, times))


def _both_close(name: str, own: Mapping[str, float], want: Mapping[str, float], times: float) -> bool:
    return name in own and name in want and bool(own[name] == close(name, want[name], times))
