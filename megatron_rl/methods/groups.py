"""The input of an advantage estimator: a reward table in float64, and statistics that stay exact on degenerate groups.

Importing it loads no torch: a plug-in names `Groups` in its annotations, and recipes with plug-ins are checked without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rl.methods.numerics import rounding_unit, safe_divide

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.data.rewards import RewardTable

_LARGEST_REWARD = 1e100  # squares of differences stay finite in float64
_UNIT, _UNIT_FLOAT32 = 2.0**-52, 2.0**-23  # relative rounding units


class Centred(NamedTuple):
    """Values around their group's mean.

    Attributes:
        values: shape of the input; exactly 0 where the group is constant or the entry is not valid.
        low: the group's smallest value, [n, 1, ...]; 0 of an empty group.
        offset: the group's mean less `low`, [n, 1, ...]; exactly 0 where all are equal.
        span: largest minus smallest value of the group, [n, 1, ...]; exactly 0 where the group is constant.
    """

    values: Tensor
    low: Tensor
    offset: Tensor
    span: Tensor

    @property
    def mean(self) -> Tensor:
        """The group's mean, [n, 1, ...]; exactly the common value where all are equal."""
        return self.low + self.offset


class Groups:
    """A reward table as estimators see it: float64, invalid entries 0, groups along dimension 0.

    Attributes:
        values: float64 [n, m, k]; what a reward did not score is filled in, see `RewardTable.filled`.
        sizes: float64 [n, m, k], what rounding noise of `values` is relative to.
        valid: bool [n, m].
        scored: bool [n, m, k], False where invalid.
        weights: float64 [k].
        names: the k reward names.
        count: float64 [n], valid rollouts per prompt.
        present: bool [n], prompts with at least one valid rollout.
        unit: relative rounding unit of the rewards as given; differences of a few units count as none.
    """

    def __init__(self, table: RewardTable) -> None:
        self.table = table
        self.valid = table.mask
        self.values = table.filled
        self.sizes = self.values.abs() if table.sizes is None else table.sizes
        self.scored = table.scored_mask
        self.names = table.names
        self.weights = self.values.new_tensor([table.weight(name) for name in table.names])
        self.count = self.valid.sum(1).double()
        self.present = self.count > 0
        # A float32 reward carries float32 noise into float64; values of coarser types count as exact.
        self.unit = min(rounding_unit(table.values), _UNIT_FLOAT32)
        for name in self.names:
            if not math.isfinite(table.weight(name)):
                raise ValueError(f"the weight of the reward {name!r} must be a finite number, not {table.weight(name)}")
        if self.values.numel() and (self.values.abs() * self.weights.abs().clamp(min=1)).max() > _LARGEST_REWARD:
            raise ValueError(f"a reward, or a reward times its weight, exceeds {_LARGEST_REWARD:g} in size; rescale it")

    def weighted(self, names: Iterable[str] | None = None) -> tuple[Tensor, Tensor]:
        """Weighted sum of the named rewards (None: all), and the sum of its terms' sizes; float64 [n, m] each."""
        total = _zeros(self.values[:, :, 0]) if self.names else self.valid.double() * 0
        size = _zeros(total)
        for index, name in enumerate(self.names):
            if names is None or name in names:
                term = self.values[:, :, index] * self.weights[index]
                total, size = total + term, size + (self.sizes[:, :, index] * self.weights[index]).abs()
        return total, size

    @cached_property
    def rewards(self) -> Tensor:
        """The scalar reward: weighted sum of all columns, float64 [n, m]; 0 where invalid."""
        return self.weighted()[0]

    @cached_property
    def centred(self) -> Centred:
        """`rewards` around their group means."""
        return self.centre(*self.weighted())

    @cached_property
    def means(self) -> tuple[Tensor, Tensor]:
        """Group means of `rewards` less `base`, float64 [n] (0 of an empty group), and `base`, a scalar.

        An offset common to all rewards is in `base` and costs no digits; among different scales `base` is small.
        """
        low, offset = self.centred.low[:, 0], self.centred.offset[:, 0]
        base = low[low.abs().where(self.present, math.inf).argmin()]
        return (low - base + offset).where(self.present, 0.0), base

    def centre(self, values: Tensor, size: Tensor | None = None) -> Centred:
        """Values [n, m] or [n, m, k] around their group means.

        Args:
            values: float64.
            size: what rounding noise is relative to, same shape; None: the values' own sizes. For a sum of terms that
                cancel, the sum of the terms' sizes.
        """
        return centre(values, self.valid, self.count, self.unit, size)

    @cached_property
    def columns(self) -> Centred:
        """Every reward around its group means, [n, m, k]: over what was scored, and 0 where nothing was."""
        return centre(self.values, self.scored, self.scored.sum(1).double(), self.unit, self.sizes)

    def columns_std(self, ddof: int) -> Tensor:
        """Standard deviation of every reward per group, over what was scored; [n, 1, k], 0 as in `std`."""
        return _std(self.columns, self.scored.sum(1, keepdim=True), ddof)

    def sum_normalised(self, terms: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the columns of normalised rewards, and of the terms' sizes; float64 [n, m] each.

        Terms that cancel leave rounding noise, the rewards' own and that of the sum, which whitening would blow up where
        the batch has nothing else: it becomes exactly 0.

        Args:
            terms: weighted and divided by `std`, [n, m, k].
            std: [n, 1, k], 0 where the column is constant.
        """
        total, size = terms.sum(2), terms.abs().sum(2)
        largest = self.sizes.amax(1, keepdim=True)
        noise = 4 * self.unit * (safe_divide(largest, std) * self.weights.abs()).sum(2)
        silent = (total.abs() <= noise).all(1, keepdim=True)
        return total.masked_fill(silent | (total.abs() <= 16 * _UNIT * size), 0.0), size

    def whiten(self, values: Tensor, over: str, **options: Any) -> Tensor:
        """Values [n, m] whitened over the batch's valid rollouts, see `whiten`; over `tokens` each counts by its length."""
        return whiten(values, self.valid, counts=self.table.lengths if over == "tokens" else None, **options)

    def leave_one_out(self, values: Tensor, extra: Tensor) -> Moments:
        """Moments of `values` [n] over all other present prompts, see `leave_one_out`."""
        return leave_one_out(values, extra, self.present)

    def std(self, centred: Centred, ddof: int) -> Tensor:
        """Standard deviation per group, [n, 1, ...]; 0 for constant groups and groups of at most `ddof` rollouts."""
        return _std(centred, self.count.reshape(-1, *([1] * (centred.values.dim() - 1))), ddof)


def _std(centred: Centred, count: Tensor, ddof: int) -> Tensor:
    scaled = centred.values / centred.span.where(centred.span > 0, 1.0)  # squares cannot underflow
    variance = scaled.square().sum(1, keepdim=True) / (count - ddof).clamp(min=1)
    return variance.sqrt() * centred.span


def centre(values: Tensor, valid: Tensor, count: Tensor, unit: float, size: Tensor | None = None) -> Centred:
    """See `Groups.centre`. Values are shifted by the group's minimum first: a large common offset costs no digits.

    `valid` is [n, m] with `count` [n], or of the values' own shape with `count` [n, k].
    """
    own = valid.dim() == values.dim() > 2
    shape = (len(count), 1, *(count.shape[1:] if own else [1] * (values.dim() - 2)))
    valid = valid if own else valid.reshape(*valid.shape, *([1] * (values.dim() - 2)))
    present = (count > 0).reshape(shape)
    low = values.where(valid, math.inf).amin(1, keepdim=True).where(present, 0.0)
    high = values.where(valid, -math.inf).amax(1, keepdim=True).where(present, 0.0)
    size = (values if size is None else size).abs().where(valid, 0.0).amax(1, keepdim=True)
    constant = high - low <= 4 * unit * size
    shifted = (values - low).where(valid, 0.0)
    offset = shifted.sum(1, keepdim=True) / count.clamp(min=1).reshape(shape)
    centred = (shifted - offset).where(valid & ~constant, 0.0)
    return Centred(centred, low, offset, (high - low).masked_fill(constant, 0.0))


def whiten(
    values: Tensor,
    valid: Tensor,
    *,
    counts: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_mode: str = "var_add",
    normalize: bool = True,
    unit: float = _UNIT,
    size: Tensor | None = None,
) -> Tensor:
    """Values over the whole batch to mean 0 and, with `normalize`, standard deviation 1.

    Args:
        values: float64, any shape.
        valid: bool, same shape; the result is 0 elsewhere.
        counts: how often each value counts, same shape: response lengths for statistics over tokens. None: once.
        ddof: 1 sample, 0 population variance.
        eps, eps_mode: `std_add` (x - mean) / (std + eps), `var_add` (x - mean) / sqrt(var + eps), `var_clamp`
            (x - mean) / sqrt(max(var, eps)).
        unit, size: differences of a few `unit` relative to the largest `size` (None: of `values`) are rounding noise.

    Returns:
        Same shape. Exactly 0 everywhere where all values are equal, however small eps is.
    """
    weight = valid.double() if counts is None else counts.double().where(valid, 0.0)
    live = weight > 0
    total = weight.sum()
    if not live.any():
        return _zeros(values)
    seen = values[live]
    low, high = seen.min(), seen.max()
    largest = (values if size is None else size)[live].abs().max()
    if high - low <= 4 * unit * largest or total <= ddof:
        return _zeros(values)
    shifted = (values - low).where(valid, 0.0)
    centred = (shifted - (weight * shifted).sum() / total).where(valid, 0.0)
    # A value at the mean becomes 0, not the mean's rounding error: a group without signal has no advantage.
    centred = centred.masked_fill(centred.abs() <= 64 * _UNIT * (high - low), 0.0)
    if not normalize:
        return centred
    scaled = centred / (high - low)  # squares cannot underflow
    std = ((weight * scaled.square()).sum() / (total - ddof)).sqrt() * (high - low)
    if eps_mode == "std_add":
        return centred / (std + eps)
    if eps_mode == "var_add":
        return centred / (std.square() + eps).sqrt() if eps else centred / std
    if eps_mode == "var_clamp":
        return centred / std.square().clamp(min=eps).sqrt() if eps else centred / std
    raise ValueError(f"eps_mode must be std_add, var_add or var_clamp, not {eps_mode!r}")


class Moments(NamedTuple):
    """Moments of a set of numbers: how many, their mean, their sum of squared deviations; and the sum of a second
    quantity."""

    size: Tensor
    mean: Tensor
    deviation: Tensor
    total: Tensor


def _merge(a: Moments, b: Moments) -> Moments:
    size = a.size + b.size
    share = b.size / size.clamp(min=1)
    delta = b.mean - a.mean
    deviation = a.deviation + b.deviation + delta.square() * a.size * share
    return Moments(size, a.mean + delta * share, deviation, a.total + b.total)


def leave_one_out(values: Tensor, extra: Tensor, present: Tensor) -> Moments:
    """Moments of all other entries, for every entry: float64 [n] each.

    A binary tree of merges instead of subtracting each entry from the total: O(n), and exact where the others are
    equal or their `extra` is zero, which subtraction is not.

    Args:
        values, extra: float64 [n].
        present: bool [n]; absent entries do not count.
    """
    one = present.double()
    levels = [Moments(one, values * one, _zeros(values), extra * one)]
    while levels[-1].size.numel() > 1:
        below = levels[-1]
        if below.size.numel() % 2:
            below = levels[-1] = Moments(*(_with_zero(x) for x in below))
        levels.append(_merge(Moments(*(x[0::2] for x in below)), Moments(*(x[1::2] for x in below))))
    others = Moments(*map(_zeros, levels[-1]))
    for level in reversed(levels[:-1]):
        left, right = Moments(*(x[0::2] for x in level)), Moments(*(x[1::2] for x in level))
        others = Moments(*(x[: left.size.numel()] for x in others))
        of_left, of_right = _merge(others, right), _merge(others, left)
        others = Moments(*map(_interleaved, of_left, of_right))
    return Moments(*(x[: values.numel()] for x in others))


def _zeros(like: Tensor) -> Tensor:
    return like.new_zeros(like.shape)


def _with_zero(values: Tensor) -> Tensor:
    """[n] to [n + 1]."""
    longer = values.new_zeros(values.numel() + 1)
    longer[:-1] = values
    return longer


def _interleaved(first: Tensor, second: Tensor) -> Tensor:
    """Two tensors [n] to [2 n]: one of the first, one of the second, and so on."""
    both = first.new_empty(2 * first.numel())
    both[0::2], both[1::2] = first, second
    return both
