"""Formulas of the papers that no training step needs: constants, biases and oracles that claims are checked against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.data.rewards import RewardTable
from megatron_rl.methods.groups import Groups
from megatron_rl.methods.numerics import above, below, bounded_exp
from megatron_rl.methods.surrogates.dgpo import dgpo

LN_METHODS = ("grpo", "cispo", "ce", "ce_eq31", "dgpo")


# --------------------------------------------------------------------------------------------------------------- DGPO
def dgpo_constants(
    pi_old: Tensor, *, n: int, m: int, eps_low: float = 0.2, eps_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """C_left and C_right of DGPO Eq. 9, which make the probability-gradient weight continuous at both bounds."""
    left = (1 - eps_low) ** -n * pi_old ** -(n + 1)
    right = (1 + eps_high) ** (1 / m) * pi_old ** (1 / m - 1)
    return left, right


def dgpo_probability_weight(
    pi: Tensor, pi_old: Tensor, advantages: Tensor, *, n: int, m: int, eps_low: float = 0.2, eps_high: float = 0.2
) -> Tensor:
    """W of DGPO Eq. 9, the weight of the gradient of pi itself; F = W pi is what the gradient weight `dgpo` gives."""
    log_ratio = pi.log() - pi_old.log()
    return dgpo(log_ratio, advantages, n=n, m=m, eps_low=eps_low, eps_high=eps_high) / pi


def aspo_eq6(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    eps_low2: float = 0.33,
    eps_high2: float = 3.0,
) -> Tensor:
    """ASPO as DGPO's Eq. 6 prints it: 1/w for both signs. Not what its authors' code does; see the weight `aspo`.

    It is discontinuous at w = 1 - eps_low2 (A > 0) and at w = 1 + eps_high2 (A < 0).
    """
    positive, negative = advantages > 0, advantages < 0
    weight = bounded_exp(-log_ratio)
    weight = torch.where(below(log_ratio, math.log(1 - eps_low2)) & positive, 1 - eps_low2, weight)
    weight = torch.where(above(log_ratio, math.log(1 + eps_high2)) & negative, 1 + eps_high2, weight)
    stopped = below(log_ratio, math.log(1 - eps_low)) & negative | above(log_ratio, math.log(1 + eps_high)) & positive
    return torch.where(stopped, 0.0, weight)


def ln_bias(method: str, gamma: float, n: int = 1, r0: float = 0.8, beta1: float = 0.75) -> float:
    """Left-boundary bias of DGPO Eq. 29-32: integral of |F(r) - r| r^gamma over 0 < r < r0, in units of k delta.

    Args:
        method: grpo (and ASPO), cispo (and GPPO), ce, dgpo; ce_eq31 is Eq. 31 as printed, which puts the absolute value
            around the integral although its integrand changes sign at beta1 r0.
        gamma: exponent of the density k r^gamma of ratios.
        n: DGPO's exponent.
        r0: 1 - eps_low.
        beta1: CE-GPPO's factor.
    """
    scale = r0 ** (gamma + 2)
    if method == "grpo":
        return scale / (gamma + 2)
    if method == "cispo":
        return scale / ((gamma + 1) * (gamma + 2))
    if method == "ce_eq31":
        return scale * abs(beta1 / (gamma + 1) - 1 / (gamma + 2))
    if method == "ce":
        below_sign_change = 2 * (beta1 * r0) ** (gamma + 2) / ((gamma + 1) * (gamma + 2))
        return below_sign_change + scale * (1 / (gamma + 2) - beta1 / (gamma + 1))
    if method == "dgpo":
        return scale * n / ((gamma + 2) * (n + gamma + 2))
    raise ValueError(f"no left-boundary bias for {method!r}; there are {', '.join(LN_METHODS)}")


def scaled_learning_rate(base_lr: float, base_params: float, params: float) -> float:
    """DGPO's rule for model sizes: base_lr sqrt(base_params / params)."""
    return base_lr * math.sqrt(base_params / params)


# ---------------------------------------------------------------------------------------------------------- shrinkage
def js1_lambda(table: RewardTable) -> float:
    """Plug-in of Proposition 2, v / (s + v), for the one-level baseline; 0 without variance within groups."""
    groups = Groups(table)
    of_mean = groups.std(groups.centred, ddof=1)[:, 0].square() / groups.count.clamp(min=1)
    v = float(of_mean[groups.present].mean())
    means = groups.centred.mean[:, 0][groups.present]
    s = float(means.var()) if len(means) > 1 else 0.0
    return v / (s + v) if v else 0.0


def js1_baseline(table: RewardTable, shrinkage: float) -> Tensor:
    """Eq. 9: (1 - lambda) mean_i + lambda (mean over all rollouts), float64 [n]; not independent of the own reward."""
    groups = Groups(table)
    means = groups.centred.mean[:, 0]
    overall = (means * groups.count).sum() / groups.count.sum()
    return (1 - shrinkage) * means + shrinkage * overall


def oracle_lambda(n: int, m: int, mean_variance: float, variance_of_means: float) -> float:
    """Theorem 1: (n - 1) / n v2 / (s2 + v2), v2 = E[sigma^2(x)] / (m - 1), s2 = Var[mu(x)]; 0 where both are 0."""
    v2 = mean_variance / (m - 1)
    return (n - 1) / n * v2 / (variance_of_means + v2) if v2 else 0.0


# --------------------------------------------------------------------------------------------------------------- AWPO
def awpo_kappa_min(eps_mix: float) -> float:
    """Eq. 9: what the gate guarantees for sigma_out / sigma_mix."""
    return (1 - eps_mix) / eps_mix


def awpo_clip_radius(w_mix: Sequence[float], eps_min: float = 0.18, eps_max: float = 0.20) -> float:
    """Eq. 24: the radius shrinks as more judge signal is mixed in."""
    return eps_min + (1 - math.fsum(w_mix) / len(w_mix)) * (eps_max - eps_min)


def awpo_decomposition(outcome: Tensor, reasoning: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lemma 3.1 for groups [groups, rollouts]: A_mix and its three terms anchor, perturbation and residual.

    A_mix = (s_out / s_mix) A_out + centred reasoning / (s_mix + eps) + Delta, where
    Delta = A_out [(s_out + eps) / (s_mix + eps) - s_out / s_mix] vanishes with eps. Population standard deviations.
    """
    mixed = outcome + reasoning
    s_out, s_mix = (each.std(1, correction=0, keepdim=True) for each in (outcome, mixed))
    a_out = (outcome - outcome.mean(1, keepdim=True)) / (s_out + eps)
    a_mix = (mixed - mixed.mean(1, keepdim=True)) / (s_mix + eps)
    perturbation = (reasoning - reasoning.mean(1, keepdim=True)) / (s_mix + eps)
    residual = a_out * ((s_out + eps) / (s_mix + eps) - s_out / s_mix)
    return a_mix, s_out / s_mix * a_out, perturbation, residual
