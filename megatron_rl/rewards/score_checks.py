"""Checks of every value that any kind of reward returns, whoever computed it; and counts of them."""

from __future__ import annotations

import contextlib
import math
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.base.messages import show
from megatron_rl.rewards.kinds import Reward, Score
from megatron_rl.rewards.registry import columns_of
from megatron_rl.rewards.remote import Counts, Verdict

if TYPE_CHECKING:
    import numpy as np

_PACKAGE = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(os.__file__).parent
_ROUNDING = 1e-9  # a sum of shares may end that far outside the bounds of a reward


class RewardError(RuntimeError):
    """A reward raised, or returned no finite number within its bounds; names the reward and the sample."""


@dataclass
class ScoringStats:
    """Counts of one process's rewards since the last report.

    Attributes:
        timeouts: per pooled reward with a deadline: calls past it.
        remote: per remote reward: its counts, and answers for the other ranks.
        started, early: calls of pooled and remote rewards; those that had finished when the last rollout ended.
    """

    timeouts: dict[str, int] = field(default_factory=dict)
    remote: dict[str, tuple[Counts, Mapping[str, Verdict]]] = field(default_factory=dict)
    started: int = 0
    early: int = 0

    def __iadd__(self, other: ScoringStats) -> ScoringStats:
        """Sums of both; answers are not kept."""
        for name, timeouts in other.timeouts.items():
            self.timeouts[name] = self.timeouts.get(name, 0) + timeouts
        for name, (counts, _) in other.remote.items():
            total = self.remote[name][0] if name in self.remote else Counts()
            total += counts
            self.remote[name] = (total, {})
        self.started, self.early = self.started + other.started, self.early + other.early
        return self

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> ScoringStats:
        """Undoes `plain`."""
        stats = cls(dict(plain["timeouts"]), started=plain["started"], early=plain["early"])
        stats.remote |= {name: (Counts.of(counts), {}) for name, counts in plain["remote"].items()}
        return stats

    def plain(self) -> dict[str, Any]:
        """As JSON has it, without answers."""
        remote = {name: counts.plain() for name, (counts, _) in self.remote.items()}
        return {"timeouts": self.timeouts, "remote": remote, "started": self.started, "early": self.early}

    def metrics(self) -> dict[str, float]:
        """Timeouts, overlap with generation, and the counts of remote rewards."""
        metrics = {f"reward_timeouts/{column}": float(count) for column, count in self.timeouts.items()}
        if self.started:
            metrics["reward_overlap/share"] = self.early / self.started
        for column, (counts, _) in self.remote.items():
            metrics |= counts.metrics(column)
        return metrics


def condition_reward(value: float, gate: float, threshold: float) -> float:
    """`value` where the gate reaches the threshold, else 0 (GDPO, Eq. 8). Both are raw rewards, before any weight.

    NaN where the gate has no value.
    """
    if math.isnan(gate):
        return math.nan
    return value if gate >= threshold else 0.0


def named_scores(name: str, reward: Reward, score: Score, sample_id: str) -> dict[str, float]:
    """A reward's result by column; NaN where it abstains. RewardError where it does not return what it declares.

    A reward per token goes through `token_scores` instead.
    """
    if score is None and reward.may_abstain:
        return dict.fromkeys(columns_of(name, reward), math.nan)
    parts = reward.columns
    named: dict[str, Any] = {name: score}
    if isinstance(score, Mapping):
        named = {f"{name}.{part}": value for part, value in score.items()}
    if isinstance(score, Mapping) != (parts is not None) or set(named) != set(columns_of(name, reward)):
        declared = "one number" if parts is None else f"the parts {list(parts)} in its attribute `columns`"
        returned = list(score) if isinstance(score, Mapping) else repr(score)
        raise RewardError(f"the reward {name!r} returns {returned} on sample {sample_id}, but it declares {declared}")
    for column, value in named.items():
        if not _is_finite(value):
            said = show(value) if isinstance(value, int) else repr(value)  # Python writes out no number of 5,000 digits
            raise RewardError(f"the reward {column!r} is {said} on sample {sample_id}, not a finite number")
        low, high = reward.bounds
        if not low - _ROUNDING <= float(value) <= high + _ROUNDING:
            raise RewardError(
                f"the reward {column!r} is {value!r} on sample {sample_id}, outside its bounds [{low:g}, {high:g}]"
            )
    return {column: float(value) for column, value in named.items()}


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float holds."""
    with contextlib.suppress(OverflowError):
        return isinstance(value, Real) and math.isfinite(value)
    return False


def token_scores(name: str, reward: Reward, score: Score, tokens: int, sample_id: str) -> np.ndarray:
    """The result of a reward per token, float32 [tokens]; NaN where it abstains.

    Raises:
        RewardError: it is not one number per response token, finite in float32 and within the reward's bounds.
    """
    import numpy as np

    if score is None and reward.may_abstain:
        return np.full(tokens, np.nan, dtype=np.float32)
    try:
        values = np.asarray(score, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.zeros((0, 0))
    if values.shape != (tokens,):
        returned = f"an array {values.shape}" if values.ndim == 1 else f"{score!r:.80}"
        raise RewardError(f"the reward {name!r} returns {returned} on sample {sample_id}, for {tokens} response tokens")
    low, high = reward.bounds
    with np.errstate(over="ignore"):  # a number that float32 does not hold is infinite there
        rounded = values.astype(np.float32)
    bad = ~np.isfinite(rounded) | (values < low - _ROUNDING) | (values > high + _ROUNDING)
    if bad.any():
        at = int(bad.argmax())
        raise RewardError(
            f"the reward {name!r} is {values[at]!r} for token {at} of the response on sample {sample_id}, not a finite "
            f"number in its bounds [{low:g}, {high:g}]"
        )
    return rounded


def place_of(error: Exception) -> str:
    """File and line of a user's own code where it raised; nothing where that is this package's, or a library's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _is_users(file: str) -> bool:
    path = Path(file)
    libraries = path.is_relative_to(_STANDARD_LIBRARY) or "site-packages" in path.parts
    return path.is_file() and not libraries and not path.is_relative_to(_PACKAGE)
