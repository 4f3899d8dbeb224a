"""James-Stein shrinkage baseline: two-level leave-one-out ("shrinkage baseline" paper, Eq. 10-16)."""

from __future__ import annotations

import torch

from megatron_rl.algorithms.estimators.rloo import leave_one_out_advantages
from megatron_rl.algorithms.groups import Groups, leave_one_out, safe_divide
from megatron_rl.algorithms.registry import Estimate, implements
from megatron_rl.config.methods import ESTIMATOR


@implements(ESTIMATOR, "shrinkage")
def shrinkage(groups: Groups, *, factor: bool, eps: float) -> Estimate:
    """A_ij = r_ij - (1 - lambda_i) mu_i^(-j) - lambda_i mu_(-i).

    lambda_i is estimated from the other prompts only, mu_i^(-j) from the other rollouts only, so the baseline does
    not depend on r_ij. Where the others have neither variance nor spread, lambda is 0: plain RLOO.

    Args:
        factor: the factor (n - 1) / n of Eq. 15.
        eps: added to the denominator of Eq. 15.
    """
    centred = groups.centred
    mean, base = groups.means
    of_mean = groups.std(centred, ddof=1)[:, 0].square() / groups.count.clamp(min=1)  # summand of Eq. 13
    others = leave_one_out(mean, of_mean, groups.present)
    v = others.total / others.size.clamp(min=1)  # Eq. 13
    s = others.deviation / others.size.clamp(min=1)  # Eq. 14
    weight = torch.where(v > 0, safe_divide(v, v + s + eps), 0.0)  # Eq. 15
    if factor:
        weight = weight * others.size / (others.size + 1)
    weight = torch.where(groups.present, weight, 0.0)
    from_batch = centred.values + (mean - others.mean)[:, None]
    own = leave_one_out_advantages(groups)
    advantages = (1 - weight)[:, None] * own + weight[:, None] * from_batch
    seen = weight[groups.present]
    return Estimate(
        advantages,
        metrics={"shrinkage/lambda": float(seen.mean()) if seen.numel() else 0.0},
        group={
            "shrinkage": weight,
            "v": v,
            "s": s,
            "batch_mean": torch.where(others.size > 0, others.mean + base, 0.0),
        },
    )
