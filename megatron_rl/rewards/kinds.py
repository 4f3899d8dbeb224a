"""What a reward is: a score of a response's text, by one of three kinds that differ in where the score is computed.

- `InlineReward`: in the caller's thread, once all rollouts are there. For arithmetic on the text.
- `PooledReward`: in threads or helper processes, from the moment a rollout ends. For verifiers and programs.
- `RemoteReward` (`remote.py`): by a server, from the moment a rollout ends. For judges and reward models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from megatron_rl.runtime.calls import call_pool
from megatron_rl.sample import SampleMapping

Score = float | Mapping[str, float] | None
NumberFunction = Callable[[str, SampleMapping], float]  # of completion and sample
ScoreFunction = Callable[[str, SampleMapping], Any]  # a user's own: what it returns is checked

CALL_SECONDS = 60.0  # deadline of a pooled reward that does not set its own


def stopped(sample: SampleMapping) -> bool:
    """Whether the response ended by itself; true without a `finish_reason` (a call outside a run)."""
    return sample.get("finish_reason", "stop") == "stop"


def _accept(sample: SampleMapping) -> None:
    """The default `check_sample`: every sample has what the reward needs."""


def _no_doubts(samples: Sequence[tuple[str, SampleMapping]]) -> list[str]:
    return []


class Reward:
    """A function of completion and sample, with what is declared about it.

    Attributes:
        columns: names of the numbers that it returns in a mapping; None: it returns one number.
        may_abstain: it may return None: no value for this rollout.
        check_sample: raises ValueError where a sample lacks what the reward needs; a run asks about every sample before
            it starts.
        doubts: (id, sample) pairs to warnings about samples that can be scored, but perhaps wrongly.
    """

    def __init__(
        self,
        function: ScoreFunction,
        *,
        columns: Iterable[str] | None = None,
        may_abstain: bool = False,
        check_sample: Callable[[SampleMapping], object] = _accept,
        doubts: Callable[[Sequence[tuple[str, SampleMapping]]], list[str]] = _no_doubts,
    ) -> None:
        self.function = function
        self.columns = None if columns is None else tuple(columns)
        self.may_abstain = may_abstain
        self.check_sample = check_sample
        self.doubts = doubts

    def __call__(self, completion: str, sample: SampleMapping) -> Score:
        score: Score = self.function(completion, sample)
        return score

    def close(self) -> None:
        """Ends what the reward has started; calls that have not begun are dropped."""


class InlineReward(Reward):
    """Computed in the caller's thread: a second thread would only contend for the interpreter.

    Attributes:
        batched: all rollouts are scored together, so no score is to be had early for one of them.
    """

    batched = False

    def scores(self, completions: Sequence[str], samples: Sequence[SampleMapping]) -> Iterator[Score]:
        """One score per completion, in order."""
        return map(self, completions, samples)


class PooledReward(Reward):
    """Called in threads, several rollouts at a time, each call with a deadline. The rollout of a late call has no value.

    Args:
        timeout_seconds: the deadline; None: the function has limits of its own.

    Attributes:
        late: calls so far that ran into the deadline.
    """

    def __init__(self, function: ScoreFunction, timeout_seconds: float | None = CALL_SECONDS, **declared: Any) -> None:
        super().__init__(function, **declared)
        self.timeout_seconds = timeout_seconds
        self.late = 0

    @property
    def timeouts(self) -> int | None:
        """Calls so far that ran into the deadline; None without a deadline."""
        return None if self.timeout_seconds is None else self.late

    def submit(self, completion: str, sample: SampleMapping) -> Future[Score]:
        """Starts a call. The future raises CallTimeout where it was late, or what the function raised."""
        return call_pool().submit(functools.partial(self, completion, sample), self.timeout_seconds)
