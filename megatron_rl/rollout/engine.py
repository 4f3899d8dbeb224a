"""The interface `Engine`, which rollouts, scores and weight syncs use. One lives in the trainer's processes
(`rollout.vllm_engine`), another behind a server's URL (`rollout.endpoint_engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from megatron_rl.data.images import PromptImages
from megatron_rl.rollout.drafts import Drafts
from megatron_rl.rollout.sampling import Sampling


class EngineError(RuntimeError):
    """The engine cannot be trusted to draw from the weights that it was given."""


@dataclass(frozen=True)
class Request:
    """Tokens to continue."""

    name: tuple[str, int]  # the caller's: sample id and index of a rollout
    tokens: Sequence[int]
    sampling: Sampling
    seed: int | None = None  # of this request alone; None: greedy
    scores_tokens: bool = False  # also the log-probs of `tokens`
    images: PromptImages | None = None  # of the prompt that `tokens` begin with


@dataclass(frozen=True)
class Completion:
    """The engine's response to a request."""

    request: Request
    ids: Sequence[int]
    logprobs: Sequence[float] | None  # of each of `ids`, under the sampling distribution; None: the engine does not say
    finish_reason: str  # stop | length
    version: int  # optimizer steps behind the weights that drew it
    # float32 [tokens - 1], of the request's tokens after the first; [0] unless `scores_tokens`
    token_scores: np.ndarray
    experts: np.ndarray | None = None  # see `Rollout.experts`
    cached_tokens: int = 0  # of the request's, those whose keys and values the engine still had


@dataclass(frozen=True)
class Failure:
    """A request that got no response, and why."""

    request: Request
    reason: str


class Engine(Protocol):
    """A queue of requests that a model answers, and the model's weights.

    Where an engine is several ranks (`runtime.distributed.EngineGroup`), all of them make the same calls with the same
    arguments in the same order, and get the same answers.
    """

    version: int  # optimizer steps behind the weights
    room: int  # requests that are worked on at a time; more wait in the queue
    max_scored: int  # tokens of the longest sequence that `score` takes
    experts: (
        np.dtype | None
    )  # of a token's entry in `Completion.experts`, [layers, experts per token]; None: there are none
    drafts: Drafts | None  # guesses of next tokens, which count what came of them; None: there are none

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Adds requests to the queue. Names of pending requests differ."""
        ...

    def step(self) -> Sequence[Completion | Failure]:
        """Goes on with the queue, and returns what ended with it, each pending request once; nothing where none is pending.
        It returns soon enough that new requests join those under way."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None] = ()) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first, under the current weights: float32 [len - 1] each. Nothing
        else is pending. `images`: of the sequences' prompts.

        Raises:
            EngineError: a sequence got no score.
        """
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces the weights by (Hugging Face name, full tensor) pairs, all of them or, in an engine that adds adapters
        itself, all adapters by (PEFT's name, full tensor); nothing that was computed with the old ones is used again.
        `version`: optimizer steps behind them.

        Raises:
            EngineError: a request is under way, or the engine's weights are not this process's to set.
        """
        ...

    def sleep(self) -> None:
        """Gives up the device's memory; before the next use `wake` and `load`."""
        ...

    def wake(self, part: Literal["weights", "cache"]) -> None:
        """Takes back memory for the weights, whose values come with `load`, or for what requests need beside them."""
        ...

    def shutdown(self) -> None:
        """Ends the engine, and its requests with it. Before the process group is destroyed."""
        ...


def drain(engine: Engine) -> Iterator[Completion]:
    """Steps until nothing is pending; completions in the order in which they end.

    Raises:
        EngineError: a request failed.
    """
    while engine.pending:
        for ended in engine.step():
            if isinstance(ended, Failure):
                raise EngineError(f"the engine has no answer to request {ended.request.name}: {ended.reason}")
            yield ended


def read(
    engine: Engine, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None] = ()
) -> list[Completion]:
    """Returns the completions of requests that score these sequences, in order; each draws one token more, to be dropped.

    Raises:
        EngineError: as of `Engine.score`.
    """
    greedy = Sampling(0.0, 1.0, max_tokens=1)
    seen = dict(enumerate(images))
    engine.submit([Request(("", i), tokens, greedy, None, True, seen.get(i)) for i, tokens in enumerate(sequences)])
    answers = {completion.request.name: completion for completion in drain(engine)}
    return [answers["", i] for i in range(len(sequences))]


def score_by_queue(
    engine: Engine, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None]
) -> list[np.ndarray]:
    """`Engine.score`, of the answers that `read` gets."""
    return [completion.token_scores for completion in read(engine, sequences, images)]
