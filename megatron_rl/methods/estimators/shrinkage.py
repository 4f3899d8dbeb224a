"""James-Stein shrinkage baseline: two-level leave-one-out (Eq. 10-16); and BLOO, the other prompts' mean (Eq. 10, right).

Zeng et al. 2025, "Shrinking the Variance", https://arxiv.org/abs/2511.03710
"""

from __future__ import annotations

from megatron_rl.base.typed_params import NonNegative, Share
from megatron_rl.methods.catalogue import Estimate, Groups, Tensor, advantage_estimator
from megatron_rl.methods.estimators.rloo import rloo
from megatron_rl.methods.numerics import safe_divide


@advantage_estimator("shrinkage", group_size=2)
def shrinkage(groups: Groups, *, factor: bool = True, eps: NonNegative = 0.0, weight: Share | None = None) -> Estimate:
    """A_ij = r_ij - (1 - lambda_i) mu_i^(-j) - lambda_i mu_(-i).

    lambda_i is estimated from the other prompts only, mu_i^(-j) from the other rollouts only, so the baseline does
    not depend on r_ij. Where the others have neither variance nor spread, lambda is 0: plain RLOO.

    Args:
        factor: the factor (n - 1) / n of Eq. 15.
        eps: added to the denominator of Eq. 15.
        weight: lambda of every prompt in place of Eq. 15's, as in the ablation of Figure 12.
    """
    centred = groups.centred
    mean, base = groups.means
    of_mean = groups.std(centred, ddof=1)[:, 0].square() / groups.count.clamp(min=1)  # summand of Eq. 13
    others = groups.leave_one_out(mean, of_mean)
    v = others.total / others.size.clamp(min=1)  # Eq. 13
    s = others.deviation / others.size.clamp(min=1)  # Eq. 14
    shrunk = safe_divide(v, v + s + eps).where(v > 0, 0.0)  # Eq. 15
    if factor:
        shrunk = shrunk * others.size / (others.size + 1)
    if weight is not None:
        shrunk = shrunk.new_full(shrunk.shape, weight)
    shrunk = shrunk.where(groups.present, 0.0)
    from_batch = centred.values + (mean - others.mean)[:, None]
    advantages = (1 - shrunk)[:, None] * rloo(groups) + shrunk[:, None] * from_batch
    seen = shrunk[groups.present]
    return Estimate(
        advantages,
        metrics={"shrinkage/lambda": float(seen.mean()) if seen.numel() else 0.0},
        group={"shrinkage": shrunk, "v": v, "s": s, "batch_mean": (others.mean + base).where(others.size > 0, 0.0)},
    )


@advantage_estimator("bloo", prompts=2)
def bloo(groups: Groups) -> Tensor:
    """A_ij = r_ij - mean over the other prompts k of mean_k."""
    mean, _ = groups.means
    others = groups.leave_one_out(mean, mean).mean
    return groups.centred.values + (mean - others)[:, None]
