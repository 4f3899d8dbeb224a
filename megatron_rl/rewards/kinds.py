"""Rewards score a response's text. Three kinds differ in where and when the score is computed.

- `InlineReward`: in the caller's thread, after all rollouts have ended. For arithmetic on the text.
- `PooledReward`: in threads or helper processes, as soon as a rollout ends. For verifiers and programs.
- `RemoteReward` (`remote.py`): by a server, as soon as a rollout ends. For judges and reward models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypedDict, Unpack

from megatron_rl.data.sample import SampleMapping
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.runtime.calls import call_pool

Score = float | Mapping[str, float] | Sequence[float] | None  # a sequence: one number per response token
NumberFunction = Callable[[str, SampleMapping], float]  # of completion and sample
ScoreFunction = Callable[[str, SampleMapping], Any]  # a user's own: what it returns is checked
Bounds = tuple[float, float]  # the least and the greatest value
Remark = tuple[str, bool | None]  # a line about a response, and whether it is right there; None: the line says neither
RemarkFunction = Callable[[str, SampleMapping], Sequence[Remark]]

ANY: Bounds = (-math.inf, math.inf)  # every finite number
UNIT: Bounds = (0.0, 1.0)
CALL_SECONDS = 60.0  # deadline of a pooled reward that does not set its own


def stopped(sample: SampleMapping) -> bool:
    """Whether the response ended with its end-of-sequence token; true outside a run, without a `finish_reason`."""
    return sample.get("finish_reason", "stop") == "stop"


def checked_bounds(bounds: object) -> Bounds:
    """ValueError unless these are two numbers, the first no greater than the second."""
    if not (isinstance(bounds, tuple | list) and len(bounds) == 2 and all(_is_number(value) for value in bounds)):
        raise ValueError(f"bounds = {bounds!r}, must be two numbers: the least and the greatest value of the reward")
    low, high = map(float, bounds)
    if low > high:
        raise ValueError(f"bounds = {bounds!r}: the first is greater than the second")
    return low, high


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


class Declared(TypedDict, total=False):
    """A reward's declarations beside its function: the keywords of `Reward`."""

    columns: Iterable[str] | None
    bounds: Bounds
    may_abstain: bool
    per_token: bool
    check_tokenizer: Callable[[Tokenizer], object]
    check_sample: Callable[[SampleMapping], object]
    doubts: Callable[[Sequence[tuple[str, SampleMapping]]], list[str]]
    remarks: RemarkFunction


class Reward:
    """A function of completion and sample, and its declarations.

    Attributes:
        columns: names of the numbers that it returns in a mapping; None: it returns one number.
        bounds: the least and the greatest value that each of its numbers can have. A run compares every value with them.
        may_abstain: it may return None: no value for this rollout.
        per_token: it returns one number per response token, and reads a `TokenMapping`. For training's rollouts only.
        check_tokenizer: raises ValueError where the reward does not understand the policy's tokens; called before a run.
        check_sample: raises ValueError where a sample lacks what the reward needs; called for every sample before a run.
        doubts: (id, sample) pairs to warnings about samples that may be scored wrongly.
        remarks: what there is to say of a scored completion besides its score; called for the rollouts in `samples/` only.
    """

    def __init__(
        self,
        function: ScoreFunction,
        *,
        columns: Iterable[str] | None = None,
        bounds: Bounds = ANY,
        may_abstain: bool = False,
        per_token: bool = False,
        check_tokenizer: Callable[[Tokenizer], object] = lambda tokenizer: None,
        check_sample: Callable[[SampleMapping], object] = lambda sample: None,
        doubts: Callable[[Sequence[tuple[str, SampleMapping]]], list[str]] = lambda samples: [],
        remarks: RemarkFunction = lambda completion, sample: (),
    ) -> None:
        self.function = function
        self.columns = None if columns is None else tuple(columns)
        self.bounds = checked_bounds(bounds)
        self.may_abstain = may_abstain
        self.per_token, self.check_tokenizer = per_token, check_tokenizer
        if per_token and columns is not None:
            raise ValueError("a reward per token has one column: leave out `columns`")
        self.check_sample = check_sample
        self.doubts = doubts
        self.remarks = remarks

    def __call__(self, completion: str, sample: SampleMapping) -> Score:
        score: Score = self.function(completion, sample)
        return score

    def close(self) -> None:
        """Ends processes, threads and connections; calls that have not begun are dropped."""


class InlineReward(Reward):
    """Computed in the caller's thread: a second thread would only contend for the interpreter.

    Attributes:
        batched: all rollouts are scored together, so none can be scored early.
    """

    batched = False

    def scores(self, completions: Sequence[str], samples: Sequence[SampleMapping]) -> Iterator[Score]:
        """One score per completion, in order."""
        return map(self, completions, samples)


class PooledReward(Reward):
    """Called in threads, several rollouts at a time, each call with a deadline. A late call gives its rollout no value.

    Args:
        timeout_seconds: the deadline; None: the function has limits of its own.

    Attributes:
        late: calls past the deadline so far.
    """

    def __init__(
        self, function: ScoreFunction, timeout_seconds: float | None = CALL_SECONDS, **declared: Unpack[Declared]
    ) -> None:
        super().__init__(function, **declared)
        self.timeout_seconds = timeout_seconds
        self.late = 0

    @property
    def timeouts(self) -> int | None:
        """Calls past the deadline so far; None without a deadline."""
        return None if self.timeout_seconds is None else self.late

    def submit(self, completion: str, sample: SampleMapping) -> Future[Score]:
        """Starts a call. The future raises CallTimeout past the deadline, or what the function raised."""
        return call_pool().submit(functools.partial(self, completion, sample), self.timeout_seconds)
