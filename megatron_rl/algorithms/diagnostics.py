"""Diagnostics of a step: statistics of rewards and advantages, gradient variance."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megatron_rl.algorithms.registry import AdvantageEstimator
from megatron_rl.data.rewards import RewardTable
from megatron_rl.methods.groups import Groups


def count_advantage_groups(advantages: Tensor, valid: Tensor | None = None, decimals: int = 6) -> int:
    """Advantage resolution (GDPO Fig. 3): the number of distinct groups of advantages.

    Groups of the advantages [n, m] are equal when, sorted, they agree to `decimals` decimals. Entries that are not `valid`,
    bool [n, m], do not count.
    """
    rounded = (advantages.double() * 10**decimals).round() + 0.0  # no negative zero
    if valid is not None:
        rounded = torch.where(valid, rounded, torch.inf)
        rounded = rounded[valid.any(1)]
    # A set of byte strings: sorting the rows, as torch.unique does, takes a hundred times as long.
    return len({row.tobytes() for row in rounded.sort(1).values.cpu().numpy()})


def distinct_advantage_groups(rollouts: int, rewards: int, estimator: AdvantageEstimator) -> int:
    """Resolution of an estimator over all groups of `rollouts` rollouts with `rewards` binary rewards (GDPO Fig. 3).

    Order within a group does not matter, so only multisets are enumerated. Batch statistics see all of them at once;
    the paper leaves them out (`gdpo(batch_norm=False)`).
    """
    kinds = torch.tensor(list(itertools.product((0.0, 1.0), repeat=rewards)), dtype=torch.float64)
    picks = torch.tensor(list(itertools.combinations_with_replacement(range(len(kinds)), rollouts)))
    table = RewardTable(kinds[picks], tuple(f"r{index}" for index in range(rewards)))
    return count_advantage_groups(estimator(table).advantages)


def advantage_metrics(advantages: Tensor, valid: Tensor) -> dict[str, float]:
    """Size and resolution of a step's advantages: [n, m] each."""
    present = valid.any(1)
    seen = advantages[valid].double()
    if not seen.numel():
        return {}
    silent = ((advantages == 0) | ~valid).all(1)[present]
    return {
        "advantage/mean": float(seen.mean()),
        "advantage/std": float(seen.std(correction=0)),
        "advantage/abs_mean": float(seen.abs().mean()),
        "advantage/max": float(seen.abs().max()),
        "advantage/silent_group_share": float(silent.double().mean()),
        "advantage/distinct_groups": float(count_advantage_groups(advantages, valid)),
    }


def reward_metrics(table: RewardTable) -> dict[str, float]:
    """Per reward: mean, share of groups in which it differs between rollouts, and its mean spread within groups.

    A reward whose signal share is 0 has no say in a group-wise method, whatever its weight. Rollouts it did not score do
    not count; where it scored none, its rows are left out.
    """
    groups = Groups(table)
    if not groups.present.any():
        return {}
    spread, varies = groups.columns_std(ddof=0)[:, 0], (groups.columns.span[:, 0] > 0).double()
    metrics = {}
    for index, name in enumerate(table.names):
        scored = groups.scored[:, :, index]
        if not scored.any():
            continue
        metrics[f"reward/{name}"] = float(groups.values[:, :, index][scored].mean())
        metrics[f"reward_signal_share/{name}"] = float(varies[groups.present, index].mean())
        metrics[f"reward_group_std/{name}"] = float(spread[groups.present, index].mean())
    return metrics


class GradientVariance:
    """Variance of the batch gradient from micro-batch gradients, streaming (shrinkage paper, Eq. 17-18).

    tr Cov(g) of g = mean of b i.i.d. micro-batch gradients g_i, unbiased:
    (sum |g_i|^2 - |sum g_i|^2 / b) / (b (b - 1)). Only squared norms come here, each summed over all shards of the
    parameters. With one g_i per data-parallel rank they are at hand without a second copy of the gradients: the norms
    before the all-reduce, and the norm of the sum after it.

    Micro-batches of different sizes n_i, whose g_i are sums over n_i i.i.d. terms, enter as N / (b n_i) |g_i|^2, N the
    sum of the sizes; that is unbiased too, and Eq. 18 where all sizes are equal.
    """

    def __init__(self) -> None:
        self.count = 0
        self.squares = 0.0  # sum of |g_i|^2 / n_i
        self.size = 0.0

    def add(self, squared_norm: float, size: float = 1.0) -> None:
        """Records |g_i|^2, over all shards of the parameters, of a micro-batch of `size` > 0."""
        self.count += 1
        self.squares += squared_norm / size
        self.size += size

    def of_sum(self, squared_norm_of_sum: float) -> float:
        """tr Cov of sum g_i, given |sum g_i|^2. ValueError with fewer than two micro-batches."""
        if self.count < 2:
            raise ValueError(f"gradient variance needs at least 2 micro-batches, not {self.count}")
        return max(self.size * self.squares - squared_norm_of_sum, 0.0) / (self.count - 1)

    def value(self, squared_norm_of_sum: float) -> float:
        """tr Cov of the mean of the g_i, given |sum g_i|^2. ValueError with fewer than two micro-batches."""
        return self.of_sum(squared_norm_of_sum) / max(self.count, 1) ** 2
