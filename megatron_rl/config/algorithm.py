"""The recipe's section `algorithm`. See `schema`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config.keys import CountOrNone, Finite, NonNegative, Params, Section, Share, Tokens, key

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "mse", "k3", "abs"]
Ratio = Literal["token", "sequence", "sequence-product"]


@dataclass
class MethodConfig(Section):
    name: str = key(meaning="the method")
    params: Params = key({}, "its parameters")


@dataclass
class KLConfig(Section):
    """KL divergence from the reference policy: a loss term (`coef`), a reward column (`reward_coef`), or both."""

    coef: NonNegative = key(0.0, "weight of the loss term. With both coefficients 0 no reference policy is kept")
    estimator: KLEstimator = key("k3", "`mse` is another name of `k2`")
    reward_coef: NonNegative = key(0.0, "weight of the reward column `kl`")
    reward_estimator: KLEstimator = key("k1", "as `estimator`")


@dataclass
class CorrectionFilterConfig(Section):
    """Drops tokens, or whole rollouts, whose train/rollout mismatch lies outside [low, high]."""

    level: Literal["token", "geometric", "sequence"] = key(
        "token", "what is judged: a token, the mean over the rollout's tokens, or their sum"
    )
    by: Literal["ratio", "k1", "k2", "k3"] = key(
        "ratio", "`ratio`: pi_train(old) / pi_rollout; the others: the KL divergence of the same samples"
    )
    low: Finite | None = key(None, "lower bound")
    high: Finite | None = key(None, "upper bound")


@dataclass
class CorrectionConfig(Section):
    """Train/rollout mismatch: one importance weight pi_train(old) / pi_rollout, truncated at `cap`, and any
    filters."""

    weight: Literal["none", "token", "geometric", "sequence"] = key(
        "none", "what one importance weight covers; with `rollout.fp8` it is `token` where the recipe does not set it"
    )
    cap: Annotated[float, Field(gt=0)] = key(2.0, "larger weights are cut to it")
    filters: list[CorrectionFilterConfig] = field(default_factory=list)


@dataclass
class OverlongConfig(Section):
    """Soft length penalty (DAPO Eq. 13), a reward column `overlong` in [-1, 0]."""

    share: Share = key(0.0, "last part of `rollout.max_tokens`, over which the penalty grows; 0: off")
    weight: Finite = key(1.0, "of the column")


@dataclass
class AlgorithmConfig(Section):
    preset: str = key(
        "grpo", "fills in every key below that the recipe does not set, see [presets](algorithms/presets.md)"
    )
    plugins: list[str] = key([], "Python files or modules that register your own estimators or surrogates")
    estimator: MethodConfig = field(default_factory=lambda: MethodConfig(name="grpo"))
    credit: Literal["rollout", "turn"] = key(
        "rollout",
        "what has an advantage: a rollout, or [each turn](agents.md#credit) of an agent's conversation",
    )
    gamma: Annotated[float, Field(gt=0, le=1)] = key(1.0, "discount of rewards from a turn to the one before")
    surrogate: MethodConfig = field(default_factory=lambda: MethodConfig(name="clip"))
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
    drop_zero_variance_groups: bool = key(
        False, "groups whose rewards are all equal leave the update and its denominators"
    )
    zero_variance_rewards: list[str] | None = key(None, "columns that decide it; null: all")
    resample_rounds: CountOrNone = key(0, "further rounds of prompts to replace dropped groups (dynamic sampling)")
    resample_ahead: bool = key(
        True,
        "what further rounds will probably need is drawn with the first, and nothing beyond; false: round by round. What is "
        "trained on is the same",
    )
