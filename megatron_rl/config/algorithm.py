"""The section `algorithm` of a recipe: its keys, and what must hold between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from omegaconf import MISSING

from megatron_rl.base.typed_params import Range
from megatron_rl.config.keys import CountOrNone, Finite, NonNegative, Share, Tokens, key, problems
from megatron_rl.methods import ESTIMATOR, WEIGHT, check_method

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "mse", "k3", "abs"]
Ratio = Literal["token", "sequence", "sequence-product"]


@dataclass
class MethodConfig:
    name: str = key(MISSING, "the method")
    params: dict[str, Any] = key({}, "its parameters")


@dataclass
class KLConfig:
    """KL divergence from the reference policy: a loss term (`coef`), a reward column (`reward_coef`), or both."""

    coef: NonNegative = key(0.0, "weight of the loss term. With both coefficients 0 no reference policy is kept")
    estimator: KLEstimator = key("k3", "`mse` is another name of `k2`")
    reward_coef: NonNegative = key(0.0, "weight of the reward column `kl`")
    reward_estimator: KLEstimator = key("k1", "as `estimator`")


@dataclass
class CorrectionFilterConfig:
    """Drops tokens, or whole rollouts, whose train/rollout mismatch lies outside [low, high]."""

    level: Literal["token", "geometric", "sequence"] = key(
        "token", "what is judged: a token, the mean over the rollout's tokens, or their sum"
    )
    by: Literal["ratio", "k1", "k2", "k3"] = key(
        "ratio", "`ratio`: pi_train(old) / pi_rollout; the others: the KL divergence of the same samples"
    )
    low: float | None = key(None, "lower bound")
    high: float | None = key(None, "upper bound")


@dataclass
class CorrectionConfig:
    """Train/rollout mismatch: one importance weight pi_train(old) / pi_rollout, truncated at `cap`, and any
    filters."""

    weight: Literal["none", "token", "geometric", "sequence"] = key(
        "none", "what one importance weight covers; with `rollout.fp8` it is `token` where the recipe does not set it"
    )
    cap: Annotated[float, Range(above=0)] = key(2.0, "larger weights are cut to it")
    filters: list[CorrectionFilterConfig] = field(default_factory=list)


@dataclass
class OverlongConfig:
    """Soft length penalty (DAPO Eq. 13), a reward column `overlong` in [-1, 0]."""

    share: Share = key(0.0, "last part of `rollout.max_tokens`, over which the penalty grows; 0: off")
    weight: Finite = key(1.0, "of the column")


@dataclass
class AlgorithmConfig:
    preset: str = key(
        "grpo", "fills in every key below that the recipe does not set, see [presets](algorithms/presets.md)"
    )
    plugins: list[str] = key([], "Python files or modules that register your own estimators or weights")
    estimator: MethodConfig = field(default_factory=lambda: MethodConfig(name="grpo"))
    weight: MethodConfig = field(default_factory=lambda: MethodConfig(name="clip"))
    ratio: Ratio = key("token", "`sequence` is the geometric mean: [ratios](algorithms/ratios.md)")
    aggregation: Aggregation = key(
        "seq-mean-token-mean", "one loss per token to one number: [aggregation](algorithms/aggregation.md)"
    )
    max_length: Tokens | None = key(
        None, "the constant divisor of `seq-mean-token-sum-norm`, tokens; null: `rollout.max_tokens`"
    )
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: Finite = key(0.0, "weight of the entropy bonus")
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    truncated: Literal["keep", "mask", "drop"] = key(
        "keep", "rollouts cut at the token limit; `mask`: no loss, `drop`: no loss, no statistics"
    )
    drop_no_signal_groups: bool = key(False, "groups whose rewards are all equal leave the update and its denominators")
    signal_rewards: list[str] | None = key(None, "columns that decide it; null: all")
    resample_rounds: CountOrNone = key(0, "further rounds of prompts to replace dropped groups (dynamic sampling)")


def check_algorithm(config: AlgorithmConfig) -> None:
    """Checks a complete section on its own: names, parameters, and options that would do nothing.

    The user's methods must be registered first (`load_plugins(config.plugins)`).

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    for problem in problems(config, "algorithm"):
        raise ValueError(problem)
    check_method(ESTIMATOR, config.estimator.name, config.estimator.params)
    check_method(WEIGHT, config.weight.name, config.weight.params)
    _check_correction(config.correction)
    if config.max_length is not None and config.aggregation != "seq-mean-token-sum-norm":
        raise ValueError(
            f"algorithm.max_length ({config.max_length}) has no effect with aggregation {config.aggregation!r}; "
            "remove it, or use seq-mean-token-sum-norm"
        )
    if config.resample_rounds and not config.drop_no_signal_groups:
        raise ValueError(
            f"algorithm.resample_rounds ({config.resample_rounds}) replaces dropped groups; "
            "it needs algorithm.drop_no_signal_groups=true"
        )


def _check_correction(config: CorrectionConfig) -> None:
    for index, each in enumerate(config.filters):
        where = f"algorithm.correction.filters[{index}]"
        if each.low is None and each.high is None:
            raise ValueError(f"{where} has neither low nor high, so it would drop nothing; set at least one")
        for name in ("low", "high"):
            if getattr(each, name) is not None and math.isnan(getattr(each, name)):
                raise ValueError(f"{where}.{name} is not a number; set one, or null for no bound")
        if each.low is not None and each.high is not None and not each.low < each.high:
            raise ValueError(f"{where}: low ({each.low}) must be less than high ({each.high})")
