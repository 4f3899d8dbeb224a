"""AWPO: a variance gate mixes in the judge's reward, difficulty weighs the groups (AWPO v2 Eq. 17-24, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.algorithms.groups import Groups, safe_divide
from megatron_rl.algorithms.registry import Estimate, implements
from megatron_rl.config.methods import ESTIMATOR


@implements(ESTIMATOR, "awpo")
class AWPO:
    """A = d [(1 - w) A_out + w A_mix], w the gated dispersion ratio rho, d the difficulty weight.

    The column `reasoning` is the judge's; all others sum to the outcome. Group statistics are over 1/K (Eq. 18).
    Where the judge has no score for a rollout, its mixed reward is the outcome plus the group's mean score: the judge's
    part of its mixed advantage is 0, and Eq. 18-21 see the mixed rewards that are used. A group without any score has
    w = 0.

    Args:
        reasoning: name of the judge's column.
        eps_mix: groups with rho at or above it get no judge signal (Eq. 21).
        tau_low, tau_high: mean outcomes strictly between them are of intermediate difficulty (Eq. 22).
        alpha_base, alpha_prio: difficulty weight outside and inside (Eq. 22).
        eps, eps_std: stabilisers of Eq. 19 and Eq. 20.
        eps_min, eps_max: bounds of the clip radius (Eq. 24).
        r_out_max: fixed saturation level (v1). None: the largest group mean seen so far, raised by the batch before
            gating and kept in `state_dict` (v2).
    """

    def __init__(
        self,
        *,
        reasoning: str,
        eps_mix: float,
        tau_low: float,
        tau_high: float,
        alpha_base: float,
        alpha_prio: float,
        eps: float,
        eps_std: float,
        eps_min: float,
        eps_max: float,
        r_out_max: float | None,
    ) -> None:
        self.reasoning = reasoning
        self.eps_mix, self.tau_low, self.tau_high = eps_mix, tau_low, tau_high
        self.alpha_base, self.alpha_prio = alpha_base, alpha_prio
        self.eps, self.eps_std = eps, eps_std
        self.eps_min, self.eps_max = eps_min, eps_max
        self.r_out_max = r_out_max
        self.peak = -math.inf

    def __call__(self, groups: Groups) -> Estimate:
        outcome, size = groups.weighted([name for name in groups.names if name != self.reasoning])
        out = groups.centre(outcome, size)
        mix = groups.centre(*groups.weighted())
        sigma_out, sigma_mix = groups.std(out, ddof=0), groups.std(mix, ddof=0)
        a_out = safe_divide(out.values, sigma_out + self.eps)
        a_mix = safe_divide(mix.values, sigma_mix + self.eps)
        mean = out.mean[:, 0]
        rho = safe_divide(sigma_mix, sigma_out + sigma_mix + self.eps_std)[:, 0]
        seen = groups.present  # at least one prompt: the registry refuses a table without rollouts
        if self.r_out_max is None:
            self.peak = max(self.peak, float(mean[seen].max()))
        peak = self.peak if self.r_out_max is None else self.r_out_max
        # Strict comparisons up to rounding: a mean that equals a threshold in exact arithmetic is not beyond it.
        noise = 8 * groups.unit * float(size.max())
        gate = (peak - mean > noise) & (self.eps_mix - rho > 8 * torch.finfo(torch.float64).eps)
        judged = groups.scored[:, :, groups.names.index(self.reasoning)].any(1)
        w_mix = torch.where(gate & judged, rho, 0.0)
        medium = (mean - self.tau_low > noise) & (self.tau_high - mean > noise)
        difficulty = self.alpha_base + (self.alpha_prio - self.alpha_base) * medium.double()  # Eq. 22
        advantages = difficulty[:, None] * ((1 - w_mix)[:, None] * a_out + w_mix[:, None] * a_mix)
        w_bar = float(w_mix[seen].mean())
        radius = self.eps_min + (1 - w_bar) * (self.eps_max - self.eps_min)
        metrics = {
            "awpo/w_mix": w_bar,
            "awpo/clip_radius": radius,
            "awpo/r_out_max": peak,
            "awpo/rho": float(rho[seen].mean()),
            "awpo/difficulty": float(difficulty[seen].mean()),
            "awpo/gate_open_share": float((w_mix[seen] > 0).double().mean()),
            "awpo/sigma_out": float(sigma_out[seen].mean()),
            "awpo/sigma_mix": float(sigma_mix[seen].mean()),
        }
        return Estimate(
            advantages,
            metrics=metrics,
            clip_range=(radius, radius),
            group={
                "rho": rho,
                "w_mix": w_mix,
                "difficulty": difficulty,
                "mean_out": mean,
                "sigma_out": sigma_out[:, 0],
                "sigma_mix": sigma_mix[:, 0],
            },
        )

    def state_dict(self) -> dict[str, Any]:
        return {"r_out_max": self.peak} if self.r_out_max is None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        expected = {"r_out_max"} if self.r_out_max is None else set()
        if set(state) != expected:
            raise ValueError(f"awpo's state must hold {sorted(expected)}, not {sorted(state)}")
        if expected:
            self.peak = float(state["r_out_max"])
