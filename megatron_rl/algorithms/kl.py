"""Estimators of KL(pi || reference) from samples of pi (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

import math
import typing

import torch
from torch import Tensor

from megatron_rl.base.messages import unknown_name
from megatron_rl.config.algorithm import KLEstimator


def kl_divergence(log_probs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL(pi || reference) of each token drawn from pi, same shape; differentiable in `log_probs`.

    Args:
        log_probs, reference: log-probs of the tokens under pi and under the reference.
        estimator: with d = log pi - log reference: `k1` d; `k2` or `mse` d^2 / 2; `k3` exp(-d) - 1 + d; `abs` |d|.
            As a loss, k2 has the gradient of the KL itself, k3 that of the reversed KL, and k1's is zero on average:
            it is meant for rewards.

    Raises:
        ValueError: on an unknown estimator.
    """
    if estimator not in typing.get_args(KLEstimator):
        raise ValueError(unknown_name("KL estimator", estimator, typing.get_args(KLEstimator)))
    precise = torch.promote_types(log_probs.dtype, torch.float32)
    difference = log_probs.to(precise) - reference.to(precise)
    if estimator == "k1":
        return difference
    if estimator in ("k2", "mse"):
        return difference.square() / 2
    if estimator == "abs":
        return difference.abs()
    return _expm1(-difference) + difference


def _expm1(value: Tensor) -> Tensor:
    """exp(value) - 1, continued linearly where it would overflow: the gradient stays large and keeps its sign."""
    bound = 600.0 if value.dtype == torch.float64 else 60.0
    return torch.expm1(value.clamp(max=bound)) + math.exp(bound) * (value - bound).clamp(min=0)


def sequence_kl(old_log_probs: Tensor, reference: Tensor, sequence_ids: Tensor, estimator: str = "k1") -> Tensor:
    """KL summed over each rollout's response, for the reward: [tokens] -> float64 [rollouts].

    Give it, as [n, m], to `Algorithm.compute_advantages(reference_kl=...)`.
    """
    tokens = kl_divergence(old_log_probs.detach(), reference.detach(), estimator).double()
    rollouts = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    return torch.zeros(rollouts, dtype=torch.float64, device=tokens.device).index_add_(0, sequence_ids, tokens)
