"""Metrics that add up over micro-batches and ranks: sums with their counts, and maxima."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Metrics:
    """Of a part of a minibatch: scalar float64 tensors. A mean is its sum / its count, over all parts."""

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

    def on_host(self) -> Metrics:
        """The same numbers as CPU tensors, moved together."""
        sums, maxima = self.flat()
        return self.with_flat(sums.cpu(), maxima.cpu())

    def flat(self) -> tuple[Tensor, Tensor]:
        """Two float64 vectors, to be all-reduced with SUM and with MAX; every rank has the same names."""
        sums = [part for pair in self.sums.values() for part in pair]
        empty = torch.zeros(0, dtype=torch.float64)
        return torch.stack(sums) if sums else empty, torch.stack([*self.maxima.values()]) if self.maxima else empty

    def with_flat(self, sums: Tensor, maxima: Tensor) -> Metrics:
        """The same names with the reduced vectors."""
        pairs = dict(zip(self.sums, sums.reshape(-1, 2), strict=True))
        largest = dict(zip(self.maxima, maxima, strict=True))
        return Metrics({name: (pair[0], pair[1]) for name, pair in pairs.items()}, largest)

    def values(self) -> dict[str, float]:
        """name -> number. A mean over nothing is left out. Adds the effective sample size of the correction."""
        means = {name: float(total / count) for name, (total, count) in self.sums.items() if count > 0}
        square = means.get("correction/weight_squared")
        if square:
            means["correction/effective_sample_share"] = means["correction/weight"] ** 2 / square
        return means | {name: float(value) for name, value in self.maxima.items()}
