"""The rewards of a step. Shapes: n prompts, m rollouts per prompt (largest group), k named rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TurnRewards:
    """Rewards of the turns of conversations, T turns in the longest. A response is one turn.

    Attributes:
        count: int64 [n, m], turns of each rollout; 0: it has none.
        lengths: float64 [n, m, T], drawn tokens.
        rewards: float64 [n, m, T] by column of the table, of the columns in which each turn has a reward of its own. In a
            rollout whose turns have none, its value is the last turn's.
        gamma: discount from one turn to the one before.
    """

    count: Tensor
    lengths: Tensor
    rewards: Mapping[str, Tensor]
    gamma: float = 1.0


@dataclass
class RewardTable:
    """Rewards of one step's whole batch, over all data-parallel ranks; what every advantage estimator reads.

    Args:
        values: float tensor [n, m, k]. Entries where `valid` is False are ignored, whatever they hold.
        names: the k column names.
        valid: bool tensor [n, m]; False where a rollout does not exist (ragged groups). None: all exist.
        weights: weight per column name, 1.0 where absent.
        lengths: response lengths in tokens, [n, m]; needed for statistics over tokens.
        greedy: rewards of the greedy rollout, [n, k]; needed by ReMax.
        scored: bool tensor [n, m, k]; False where a reward has no value for a rollout (a judge that did not answer).
            Values there are ignored, see `filled`. None: every reward has scored every rollout.
        has_token_rewards: beside these numbers, tokens have rewards (of weights other than 0), so no group is without signal.
        turns: where each turn gets an advantage of its own.
        sizes: float64 [n, m, k], what the rounding noise of `values` is relative to, where these are sums. None: themselves.

    Raises:
        ValueError: on shapes that do not agree, an unknown name in `weights`, or non-finite values that count.
    """

    values: Tensor
    names: tuple[str, ...]
    valid: Tensor | None = None
    weights: Mapping[str, float] | None = None
    lengths: Tensor | None = None
    greedy: Tensor | None = None
    scored: Tensor | None = None
    has_token_rewards: bool = False
    turns: TurnRewards | None = None
    sizes: Tensor | None = None

    def __post_init__(self) -> None:
        self.names = tuple(self.names)
        if self.values.dim() != 3 or self.values.shape[2] != len(self.names):
            raise ValueError(
                f"values must be [n, m, k] with k = {len(self.names)} names, not shape {tuple(self.values.shape)}"
            )
        n, m, k = self.values.shape
        if not self.values.is_floating_point():
            self.values = self.values.double()
        if self.valid is None:
            self.valid = torch.ones(n, m, dtype=torch.bool, device=self.values.device)
        for name, tensor, shape in (
            ("valid", self.valid, (n, m)),
            ("lengths", self.lengths, (n, m)),
            ("greedy", self.greedy, (n, k)),
            ("scored", self.scored, (n, m, k)),
            ("sizes", self.sizes, (n, m, k)),
        ):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape} to go with values, not {tuple(tensor.shape)}")
        unknown = set(self.weights or {}) - set(self.names)
        if unknown:
            raise ValueError(f"weights for unknown rewards {sorted(unknown)}; the table has {list(self.names)}")
        if not torch.isfinite(self.values[self.scored_mask]).all():
            raise ValueError(
                "a reward is NaN or infinite; mark what could not be scored as not valid (a rollout) or not scored "
                "(one of its rewards)"
            )

    @property
    def mask(self) -> Tensor:
        """`valid`, never None: bool [n, m]."""
        assert self.valid is not None
        return self.valid

    @property
    def scored_mask(self) -> Tensor:
        """Which entries of `values` count: bool [n, m, k], scored and of a valid rollout."""
        valid = self.mask[:, :, None].expand(self.values.shape)
        return valid if self.scored is None else valid & self.scored

    @property
    def filled(self) -> Tensor:
        """float64 [n, m, k]: `values`, 0 where invalid, and the mean of its group where a reward has no value.

        So a missing value is neither praise nor blame: its difference from the group's mean is 0, and it leaves every
        sum of rewards for a constant. A group without any value of a reward takes the mean of the batch (0 without one).
        """
        mask = self.scored_mask
        values = torch.where(mask, self.values.double(), 0.0)
        if self.scored is None or bool(mask[self.mask].all()):
            return values
        count = mask.sum(1, keepdim=True)
        group = values.sum(1, keepdim=True) / count.clamp(min=1)
        batch = values.sum((0, 1), keepdim=True) / mask.sum((0, 1), keepdim=True).clamp(min=1)
        missing = self.mask[:, :, None] & ~mask
        return torch.where(missing, torch.where(count > 0, group, batch), values)

    def column(self, name: str) -> Tensor:
        """Raw values of one reward, [n, m]."""
        return self.values[:, :, self.index(name)]

    def index(self, name: str) -> int:
        """Position of a reward. ValueError on an unknown name."""
        if name not in self.names:
            raise ValueError(f"no reward column {name!r}; the table has {list(self.names)}")
        return self.names.index(name)

    def weight(self, name: str) -> float:
        return float((self.weights or {}).get(name, 1.0))
