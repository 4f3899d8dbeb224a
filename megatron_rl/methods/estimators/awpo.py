"""AWPO: a variance gate mixes in the judge's reward, difficulty weighs the groups (Eq. 17-24 and Algorithm 1 of v2).

Lin et al. 2025, "AWPO", https://arxiv.org/abs/2512.19126
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from megatron_rl.base.typed_params import NonNegative, Positive
from megatron_rl.methods.catalogue import Estimate, Groups, Needs, advantage_estimator
from megatron_rl.methods.numerics import safe_divide

Radius = Annotated[float, Field(ge=0, lt=1)]


@advantage_estimator("awpo", needs=lambda params: Needs(columns=(params["reasoning"],), other_columns=1))
@dataclass(kw_only=True)
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

    reasoning: str = "judge"
    eps_mix: Positive = 0.7
    tau_low: float = 0.5
    tau_high: float = 1.5
    alpha_base: NonNegative = 0.5
    alpha_prio: NonNegative = 1.5
    eps: NonNegative = 1e-6
    eps_std: NonNegative = 1e-6
    eps_min: Radius = 0.18
    eps_max: Radius = 0.20
    r_out_max: float | None = None
    peak: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        for low, high in (("tau_low", "tau_high"), ("alpha_base", "alpha_prio"), ("eps_min", "eps_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} ({getattr(self, low)}) must not exceed {high} ({getattr(self, high)})")

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
        gate = (peak - mean > noise) & (self.eps_mix - rho > 8 * sys.float_info.epsilon)
        judged = groups.scored[:, :, groups.names.index(self.reasoning)].any(1)
        w_mix = rho.where(gate & judged, 0.0)
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

    def state_dict(self) -> dict[str, float]:
        return {"r_out_max": self.peak} if self.r_out_max is None else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if ("r_out_max" in state) != (self.r_out_max is None):
            raise ValueError(
                f"algorithm.estimator.params.r_out_max is {self.r_out_max}, and the state of the run that is continued has "
                f"{state.get('r_out_max', 'a fixed one')}; set it back to what it was, or start over with --resume never"
            )
        self.peak = float(state.get("r_out_max", self.peak))
