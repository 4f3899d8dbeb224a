"""A rollout turn by turn: prompt so far to request, completion to the next request or the rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.engine import Completion, Failure, Request
from megatron_rl.rollout.sampling import Sampling, rollout_seed


class Episode(Protocol):
    """One rollout while it is drawn. Every rank of an engine has the same episodes and advances them in the same order."""

    def first(self) -> Request | None:
        """The first turn's; its name is (sample id, index of the rollout), as that of every further request. None: it comes
        by `Poll`."""
        ...

    def advance(self, completion: Completion) -> Request | Rollout | None:
        """Takes a turn, and returns the next one's request, or the finished rollout; None: either comes by `Poll`."""
        ...

    def unanswered(self, failure: Failure) -> bool:
        """Returns whether the episode goes on, by `Poll`, after a request that the engine has no answer to."""
        ...


MakeEpisode: TypeAlias = Callable[[Sample, int], Episode]
"""A prompt and the index of one of its rollouts to the episode."""

Poll: TypeAlias = Callable[[bool], Sequence[tuple[tuple[str, int], Request | Rollout]]]
"""What came of the open episodes since the last call, by name: the same in the same order on all ranks of an engine, which
call it at the same points. True: waits a while for something to come, since the engine has nothing to do."""


def single_turn(sampling: Sampling, seed: int, step: int) -> MakeEpisode:
    """Episodes of one response each, with seeds of their own (`rollout_seed`)."""
    return lambda sample, index: SingleTurn(sample, index, sampling, seed, step)


class SingleTurn:
    """The response to a prompt is the rollout."""

    def __init__(self, sample: Sample, index: int, sampling: Sampling, seed: int, step: int) -> None:
        self._sample, self._index, self._sampling = sample, index, sampling
        self._seed = rollout_seed(seed, step, sample.id, index) if sampling.temperature > 0 else None

    def first(self) -> Request:
        name = self._sample.id, self._index
        return Request(name, self._sample.prompt_ids, self._sampling, self._seed, images=self._sample.images)

    def advance(self, completion: Completion) -> Rollout:
        return drawn_rollout(self._sample, self._index, completion)

    def unanswered(self, failure: Failure) -> bool:
        return False


def drawn_rollout(sample: Sample, index: int, completion: Completion) -> Rollout:
    """The prompt and what the engine has drawn behind it, which is one segment."""
    return Rollout.single_turn(
        sample,
        index,
        completion.ids,
        completion.finish_reason,
        completion.logprobs,
        completion.version,
        completion.experts,
    )
