"""The choices of the section `algorithm`."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.names import did_you_mean

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "mse", "k3", "abs")
RATIOS = ("token", "sequence", "sequence-product")
CORRECTION_WEIGHTS = ("none", "token", "geometric", "sequence")
FILTER_LEVELS = ("token", "geometric", "sequence")
FILTER_STATISTICS = ("ratio", "k1", "k2", "k3")
TRUNCATED = ("keep", "mask", "drop")


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """ValueError, naming the key and the nearest choice, unless `value` is one of them."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}")
