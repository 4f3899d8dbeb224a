"""One algorithm from four choices: estimator, surrogate, aggregation, corrections. What the trainer talks to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import Denominators, at_least_one, count_live, token_coefficients, weighted_sum
from megatron_rl.algorithms.correction import Correction, correct, correction_metrics, sequence_log_ratio
from megatron_rl.algorithms.credit import estimate_turns
from megatron_rl.algorithms.diagnostics import advantage_metrics, reward_metrics
from megatron_rl.algorithms.kl import kl_divergence
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.algorithms.registry import make_advantage_estimator, make_surrogate
from megatron_rl.algorithms.shaping import add_column, complete_groups, groups_with_variance, overlong_penalty
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.algorithm_checks import check_algorithm
from megatron_rl.config.load import algorithm_config
from megatron_rl.data.rewards import RewardTable
from megatron_rl.methods import load_plugins
from megatron_rl.methods.numerics import bounded_exp
from megatron_rl.methods.ratios import REGIONS, regions

_REPORTED_BOUNDS = (0.2, 0.2)  # regions are reported at these where the weight in use has no bounds of its own


@dataclass
class StepAdvantages:
    """The advantages of one step, and which rollouts are trained on."""

    advantages: Tensor  # float [n, m]; 0 where a rollout does not take part
    train: Tensor  # bool [n, m]: rollouts that enter the update. The others must not reach the loss or its denominators
    has_variance: Tensor  # bool [n]: prompts whose raw rewards differ between rollouts
    clip_range: tuple[float, float] | None = None  # give it to every `policy_loss` of the step
    metrics: dict[str, float] = field(default_factory=dict)  # numbers for the step's log
    group: dict[str, Tensor] = field(default_factory=dict)  # the estimator's quantities per prompt, [n] each
    # float [n, m, T], where each turn has one of its own, 0 where there is no such turn; `advantages` are then their means
    turns: Tensor | None = None


class Algorithm:
    """The four choices, ready to use: `estimator` (rewards -> advantages), `surrogate` (F(w, A)), and what `config` says."""

    def __init__(self, config: AlgorithmConfig, max_tokens: int | None = None) -> None:
        load_plugins(config.plugins)
        check_algorithm(config)
        self.config = config
        self.estimator = make_advantage_estimator(config.estimator.name, **config.estimator.params)
        self.surrogate = make_surrogate(config.surrogate.name, **config.surrogate.params)
        self.max_length = None  # tokens, the constant of `seq-mean-token-sum-norm`
        if config.aggregation == "seq-mean-token-sum-norm":
            self.max_length = _budget("algorithm.max_length", config.max_length or max_tokens)
        self._overlong_length = 0
        if config.overlong.share:
            self._overlong_length = _budget("algorithm.overlong", max_tokens)

    # ------------------------------------------------------------------------------------------ what must be provided
    @property
    def needs_reference(self) -> bool:
        """Log-probs of the reference policy are needed."""
        return bool(self.config.kl.coef or self.config.kl.reward_coef)

    @property
    def needs_entropy(self) -> bool:
        """The entropy of each token's distribution is needed, with gradient."""
        return bool(self.config.entropy_coef)

    @property
    def corrects(self) -> bool:
        """Log-probs of the rollout engine enter the loss."""
        return self.config.correction.weight != "none" or bool(self.config.correction.filters)

    # ----------------------------------------------------------------------------------------- rewards to advantages
    def compute_advantages(
        self, table: RewardTable, *, truncated: Tensor | None = None, reference_kl: Tensor | None = None
    ) -> StepAdvantages:
        """Advantages of a step, and which rollouts are trained on.

        Args:
            table: raw task rewards of the whole batch, over all data-parallel ranks; with its `turns` where
                `algorithm.credit` is `turn`.
            truncated: bool [n, m]: rollouts cut at the token limit. Needed unless `algorithm.truncated` is `keep`.
            reference_kl: [n, m], from `sequence_kl`. Needed with `algorithm.kl.reward_coef`.

        Raises:
            ValueError: naming the missing input.
        """
        config = self.config
        has_variance = groups_with_variance(table, config.zero_variance_rewards)
        shaped = self._shape(table, reference_kl)
        metrics = reward_metrics(shaped)
        metrics["groups/signal_share"] = _share(has_variance, table.mask.any(1))
        valid = table.mask
        lossless = torch.zeros_like(valid)
        if config.truncated != "keep":
            if truncated is None:
                raise ValueError(f"algorithm.truncated is {config.truncated!r}: say which rollouts were cut")
            lossless = valid & truncated
            metrics["rollouts/truncated_share"] = _share(lossless, valid)
            if config.truncated == "drop":
                valid = valid & ~lossless
        if config.drop_zero_variance_groups:
            valid = valid & has_variance[:, None]
        complete = complete_groups(valid, self.estimator.needs.group_size)
        metrics["groups/incomplete"] = float((valid.any(1) & ~complete.any(1)).sum())
        if int(complete.any(1).sum()) < self.estimator.needs.prompts:
            complete = torch.zeros_like(complete)
        metrics["groups/trained"] = float(complete.any(1).sum())
        if not complete.any():
            dtype = torch.float64 if table.values.dtype == torch.float64 else torch.float32
            return StepAdvantages(torch.zeros_like(valid, dtype=dtype), complete, has_variance, None, metrics)
        shaped, turns = replace(shaped, valid=complete), None
        if config.credit == "turn":
            result, turns = estimate_turns(self.estimator, shaped)
        else:
            result = self.estimator(shaped)
        metrics.update(advantage_metrics(result.advantages, complete))
        metrics.update(result.metrics)
        return StepAdvantages(
            result.advantages, complete & ~lossless, has_variance, result.clip_range, metrics, result.group, turns
        )

    def _shape(self, table: RewardTable, reference_kl: Tensor | None) -> RewardTable:
        overlong, kl = self.config.overlong, self.config.kl
        if overlong.share:
            if table.lengths is None:
                raise ValueError("algorithm.overlong needs response lengths: RewardTable(lengths=[n, m])")
            penalty = overlong_penalty(table.lengths, self._overlong_length, overlong.share)
            table = add_column(table, "overlong", penalty, overlong.weight)
        if kl.reward_coef:
            if reference_kl is None:
                raise ValueError("algorithm.kl.reward_coef needs the KL of each rollout: reference_kl=[n, m]")
            table = add_column(table, "kl", -reference_kl, kl.reward_coef)
        return table

    def state_dict(self) -> dict[str, object]:
        """The state that a checkpoint must hold for an exact resume."""
        return {"estimator": self.estimator.name, "state": self.estimator.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores `state_dict()`. ValueError if it belongs to another estimator."""
        if state["estimator"] != self.estimator.name:
            raise ValueError(
                f"the checkpoint's estimator is {state['estimator']!r}, the recipe's {self.estimator.name!r}"
            )
        memory = state["state"]
        assert isinstance(memory, dict)
        self.estimator.load_state_dict(memory)

    # ---------------------------------------------------------------------------------------------- packed micro-batch
    def correct(
        self, old_log_probs: Tensor | None, rollout_log_probs: Tensor | None, mask: Tensor, sequence_ids: Tensor
    ) -> Correction:
        """Importance weights and remaining mask; the given mask, and no weights, without correction.

        Call it before the update where `filters` is true: the denominators count what is left of the mask.
        """
        if not self.corrects:
            return Correction(None, mask.bool())
        if rollout_log_probs is None or old_log_probs is None:
            raise ValueError("algorithm.correction needs the engine's and the trainer's old log-probs")
        config = self.config.correction
        return correct(
            old_log_probs,
            rollout_log_probs,
            mask,
            sequence_ids,
            weight=config.weight,
            cap=config.cap,
            filters=config.filters,
        )

    def count(
        self,
        mask: Tensor,
        sequence_ids: Tensor,
        *,
        old_log_probs: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
    ) -> Denominators:
        """This part's share of the denominators, after correction filters: sum it over all parts of the minibatch."""
        return count_live(self.correct(old_log_probs, rollout_log_probs, mask, sequence_ids).mask, sequence_ids)

    def policy_loss(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rollout_log_probs: Tensor | None,
        ref_log_probs: Tensor | None,
        entropy: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        *,
        sequence_ids: Tensor,
        denominators: Denominators,
        clip_range: tuple[float, float] | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Loss of one packed micro-batch; its gradient is F(w, A) A grad log pi, aggregated, plus KL and entropy.

        All tensors are [tokens] over whole rollouts. Losses and metrics of the parts of a minibatch add up, whatever
        the cut.

        Args:
            log_probs: of the policy being trained, with gradient.
            old_log_probs: of the policy before the step's first update.
            rollout_log_probs: the engine's; needed where `corrects`, otherwise only for gauges.
            ref_log_probs: needed where `algorithm.kl.coef` is not 0.
            entropy: needed where `needs_entropy`, with gradient; otherwise only logged.
            advantages: each rollout's, repeated on its tokens.
            mask: bool; tokens that take part.
            sequence_ids: int64, 0 .. rollouts - 1, which rollout of this micro-batch each token belongs to.
            denominators: of the whole minibatch: the sum of `count` over its parts and ranks.
            clip_range: from the step's estimate.

        Returns:
            The scalar loss (at least float32), and metrics.

        Raises:
            ValueError: on shapes that differ or a missing input.
        """
        _check_shapes(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            rollout_log_probs=rollout_log_probs,
            ref_log_probs=ref_log_probs,
            entropy=entropy,
            advantages=advantages,
            mask=mask,
            sequence_ids=sequence_ids,
        )
        config = self.config
        valid = mask.bool()
        corrected = self.correct(old_log_probs, rollout_log_probs, valid, sequence_ids)
        live = corrected.mask
        precise = torch.promote_types(log_probs.dtype, torch.float32)
        log_probs = torch.where(live, log_probs.to(precise), 0.0)
        advantages = torch.where(live, advantages.detach().to(precise), 0.0)
        token_log_ratio = torch.where(live, log_probs.detach() - old_log_probs.detach().to(precise), 0.0)
        log_ratio = token_log_ratio
        if config.ratio != "token":
            log_ratio = sequence_log_ratio(log_ratio, live, sequence_ids, mean=config.ratio == "sequence")
        weight = self.surrogate(log_ratio, advantages, clip_range)
        factor = weight if corrected.weights is None else weight * corrected.weights.to(precise)
        coefficients = token_coefficients(live, sequence_ids, config.aggregation, denominators, self.max_length)
        loss = weighted_sum(-(factor.double() * advantages) * log_probs, coefficients)

        metrics = self._surrogate_metrics(token_log_ratio, log_ratio, advantages, weight, live, clip_range)
        objective = self.surrogate.objective(log_ratio, advantages, weight, clip_range)
        if corrected.weights is not None:
            objective = objective * corrected.weights.to(precise)
        count = denominators.num_tokens if config.aggregation == "token-mean" else denominators.num_sequences
        share = coefficients * at_least_one(count)
        own = count_live(live, sequence_ids)
        parts = torch.as_tensor(own.num_tokens if config.aggregation == "token-mean" else own.num_sequences)
        metrics.total("loss/objective", weighted_sum(objective.double(), share), parts)
        if rollout_log_probs is not None:
            metrics += correction_metrics(
                old_log_probs, rollout_log_probs, valid, sequence_ids, corrected, config.correction.cap
            )
        loss = self._regularised(loss, metrics, log_probs, ref_log_probs, entropy, live, coefficients)
        return loss.to(precise), metrics

    def _regularised(
        self,
        loss: Tensor,
        metrics: Metrics,
        log_probs: Tensor,
        ref_log_probs: Tensor | None,
        entropy: Tensor | None,
        live: Tensor,
        coefficients: Tensor,
    ) -> Tensor:
        """The loss with its KL and entropy terms; both are recorded in `metrics` where they are given."""
        config = self.config
        if ref_log_probs is not None:
            reference = torch.where(live, ref_log_probs.detach().to(log_probs.dtype), 0.0)
            kl = kl_divergence(log_probs, reference, config.kl.estimator)
            metrics.mean(f"reference/kl_{config.kl.estimator}", kl, live)
            if config.kl.coef:
                loss = loss + config.kl.coef * weighted_sum(kl, coefficients)
        elif config.kl.coef:
            raise ValueError("algorithm.kl.coef is not 0: the loss needs ref_log_probs")
        if entropy is not None:
            metrics.mean("policy/entropy", entropy, live)
            if config.entropy_coef:
                loss = loss - config.entropy_coef * weighted_sum(entropy, coefficients)
        elif config.entropy_coef:
            raise ValueError("algorithm.entropy_coef is not 0: the loss needs entropy")
        return loss

    def _surrogate_metrics(
        self,
        token_log_ratio: Tensor,
        log_ratio: Tensor,
        advantages: Tensor,
        weight: Tensor,
        live: Tensor,
        clip_range: tuple[float, float] | None,
    ) -> Metrics:
        """Distance to the old policy, ratios, and shares and weights of DGPO's regions."""
        metrics = Metrics()
        metrics.mean("old_policy/kl_k1", -token_log_ratio, live)
        metrics.mean("old_policy/kl_k3", bounded_exp(token_log_ratio) - 1 - token_log_ratio, live)
        ratio = bounded_exp(log_ratio)
        metrics.mean("ratio/mean", ratio, live)
        metrics.maximum("ratio/max", ratio, live)
        low, high = clip_range or self.surrogate.clip_range or _REPORTED_BOUNDS
        region = regions(log_ratio, advantages, low, high)
        for index, name in enumerate(REGIONS):
            inside = live & (region == index)
            metrics.mean(f"region_share/{name}", inside.double(), live)
            metrics.mean(f"region_weight/{name}", weight, inside)
        metrics.mean("loss/silent_token_share", ((weight * advantages) == 0).double(), live)
        return metrics


def _share(part: Tensor, whole: Tensor) -> float:
    return float((part & whole).sum() / whole.sum().clamp(min=1))


def _budget(key: str, tokens: int | None) -> int:
    if tokens is None:
        raise ValueError(f"{key} needs the response budget: make_algorithm(..., max_tokens=)")
    if tokens < 1:
        raise ValueError(f"{key}: the budget must be at least 1 token, not {tokens}")
    return tokens


def _check_shapes(log_probs: Tensor, **others: Tensor | None) -> None:
    if log_probs.dim() != 1:
        raise ValueError(f"log_probs must be packed, [tokens], not {tuple(log_probs.shape)}")
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != log_probs.shape:
            raise ValueError(f"{name} must be {tuple(log_probs.shape)} like log_probs, not {tuple(tensor.shape)}")


def make_algorithm(config: str | AlgorithmConfig | Mapping[str, object], *, max_tokens: int | None = None) -> Algorithm:
    """An algorithm from a preset's name, a complete `AlgorithmConfig`, or the keys of one (with a preset under them).

    Args:
        config: an `AlgorithmConfig` is used as is; the preset must already be merged in.
        max_tokens: `rollout.max_tokens`, where the config leaves a length to it.

    Raises:
        ValueError: naming the key, its value and what it may be.
    """
    if isinstance(config, str):
        config = {"preset": config}
    return Algorithm(config if isinstance(config, AlgorithmConfig) else algorithm_config(config), max_tokens)
