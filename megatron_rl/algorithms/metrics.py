"""Metrics that add up over micro-batches and ranks: sums with their counts, and maxima."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Metrics:
    """Metrics of a part of a minibatch: scalar float64 tensors. A mean is its sum / its count, over all parts."""

    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # name -> (sum, count)
    maxima: dict[str, Tensor] = field(default_factory=dict)  # name -> largest value

    def mean(self, name: str, values: Tensor, where: Tensor) -> None:
        """Records the mean of `values` over the tokens in the bool tensor `where`."""
        self.total(name, torch.where(where, values.detach().double(), 0.0).sum(), where.sum())

    def total(self, name: str, total: Tensor, count: Tensor) -> None:
        self.sums[name] = (total.detach().double(), count.detach().double())

    def maximum(self, name: str, values: Tensor, where: Tensor) -> None:
        """Records the largest of `values`, which are not negative, over `where`; 0 where there is none."""
        live = torch.where(where, values.detach().double(), 0.0)
        self.maxima[name] = live.max() if live.numel() else live.sum()

    def __add__(self, other: Metrics) -> Metrics:
        sums, maxima = dict(self.sums), dict(self.maxima)
        for name, (total, count) in other.sums.items():
            sums[name] = (sums[name][0] + total, sums[name][1] + count) if name in sums else (total, count)
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return Metrics(sums, maxima)

    def __reduce__(self) -> tuple[Callable[..., Metrics], tuple[object, ...]]:
        """Pickled as numbers, which leave the device together: tensors of one number each take many times as long."""
        sums = [part for pair in self.sums.values() for part in pair]
        return _with_numbers, (tuple(self.sums), _numbers(sums), tuple(self.maxima), _numbers([*self.maxima.values()]))

    def values(self) -> dict[str, float]:
        """name -> number. A mean over nothing is left out. Adds the effective sample size of the correction."""
        means = {name: float(total / count) for name, (total, count) in self.sums.items() if count > 0}
        square = means.get("correction/weight_squared")
        if square:
            means["correction/effective_sample_share"] = means["correction/weight"] ** 2 / square
        return means | {name: float(value) for name, value in self.maxima.items()}


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    return torch.stack([*scalars]).tolist() if scalars else []


def _with_numbers(
    means: Sequence[str], sums: Sequence[float], maxima: Sequence[str], largest: Sequence[float]
) -> Metrics:
    """The metrics of these names, on the CPU. `sums`: sum and count of each mean."""
    pairs = torch.tensor(sums, dtype=torch.float64).view(-1, 2)
    return Metrics(
        {name: (total, count) for name, (total, count) in zip(means, pairs, strict=True)},
        dict(zip(maxima, torch.tensor(largest, dtype=torch.float64), strict=True)),
    )
