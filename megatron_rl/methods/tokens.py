"""The input of a method's token part: one rollout. Importing it loads no torch, as with `Groups`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RolloutTokens:
    """One rollout: its advantage from the group part, and its rewards per response token.

    Attributes:
        advantage: the group part's value.
        values: float32 [response tokens, columns], of the rewards that give one number per token; 0 where one of them has
            no value for the rollout.
        weights: float32 [columns].
        names: of the columns.
    """

    advantage: float
    values: Tensor
    weights: Tensor
    names: tuple[str, ...] = ()

    @property
    def rewards(self) -> Tensor:
        """The weighted sum of the columns, float32 [response tokens]; 0 without columns."""
        return (self.values * self.weights).sum(1)

    def column(self, name: str) -> Tensor:
        """Raw values of one reward, float32 [response tokens]. ValueError on an unknown name."""
        if name not in self.names:
            raise ValueError(f"no token reward {name!r}; the rollout has {list(self.names)}")
        return self.values[:, self.names.index(name)]


def add_rewards(tokens: RolloutTokens) -> Tensor:
    """A_t = A + r_t: the token part of a method that declares none, where a recipe has rewards per token."""
    return tokens.advantage + tokens.rewards
