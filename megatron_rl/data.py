"""The few nouns that cross packages. Shapes: n prompts, m rollouts per prompt (largest group), k named rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_rl.images import PromptImages
from megatron_rl.sample import Sample


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a rollout with one author: the prompt, or one turn of the policy."""

    ids: np.ndarray  # int64 [tokens]; a turn's end-of-sequence token is included where it was drawn
    logprobs: np.ndarray | None = None  # float32 [tokens], under the engine's sampling distribution; None: not sampled
    version: int = 0  # optimizer steps behind the weights that drew the tokens


@dataclass
class Rollout:
    """One response to a prompt, token by token as the engine drew it. Only sampled tokens are trained on."""

    sample_id: str
    index: int  # 0 .. group_size - 1 within its prompt
    segments: list[Segment]  # the prompt first
    finish_reason: str  # stop | length
    experts: np.ndarray | None = None  # uint8 or uint16 [tokens, layers, experts per token] that the engine chose
    messages: list[dict[str, str]] = field(default_factory=list)  # the policy's turns as text, once decoded
    rewards: dict[str, float] = field(default_factory=dict)  # one number per reward column; NaN: it has no value

    @classmethod
    def single_turn(
        cls,
        sample: Sample,
        index: int,
        response_ids: Sequence[int],
        finish_reason: str,
        logprobs: Sequence[float] | None = None,
        version: int = 0,
        experts: np.ndarray | None = None,
    ) -> Rollout:
        """One response to a prompt. `logprobs`: of each of its tokens; None where they are unknown (NaN in the segment)."""
        ids = np.asarray(response_ids, dtype=np.int64)
        values = np.full(len(ids), np.nan) if logprobs is None else logprobs
        response = Segment(ids, np.asarray(values, dtype=np.float32), version)
        prompt = Segment(np.asarray(sample.prompt_ids, dtype=np.int64))
        return cls(sample.id, index, [prompt, response], finish_reason, experts)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [tokens], of all segments."""
        return _concatenate([segment.ids for segment in self.segments], np.int64)

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [tokens]: which of them were sampled."""
        return np.repeat(
            [segment.logprobs is not None for segment in self.segments], [len(segment.ids) for segment in self.segments]
        )

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [sampled tokens]."""
        return _concatenate([s.logprobs for s in self.segments if s.logprobs is not None], np.float32)

    @property
    def prompt_ids(self) -> np.ndarray:
        """int64 [prompt tokens]."""
        return self.segments[0].ids

    @property
    def response_ids(self) -> np.ndarray:
        """int64 [sampled tokens]."""
        return _concatenate([segment.ids for segment in self.segments if segment.logprobs is not None], np.int64)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return len(self.response_ids)

    @property
    def version(self) -> int:
        """Optimizer steps behind the oldest weights that drew a part of it; -1: no part was drawn."""
        return min((segment.version for segment in self.segments if segment.logprobs is not None), default=-1)

    @property
    def text(self) -> str:
        """The policy's last turn, which rewards read as the completion; empty until it is decoded."""
        return self.messages[-1]["content"] if self.messages else ""

    @text.setter
    def text(self, content: str) -> None:
        self.messages = [{"role": "assistant", "content": content}]


def _concatenate(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


FACTS = np.dtype(
    [
        ("row", "<i4"),
        ("num_tokens", "<i4"),  # prompt included
        ("length", "<i4"),  # sampled tokens
        ("truncated", "?"),  # cut at the token limit
        ("version", "<i8"),  # see `Rollout.version`
        ("source", "<i4"),  # the rank that hands the rollout to others
    ]
)
"""What every rank knows of every rollout."""


class Outcome(Protocol):
    """What an evaluation's statistics read of a rollout."""

    @property
    def sample_id(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class ScoredLength:
    """A rollout without its tokens: an `Outcome`."""

    sample_id: str
    length: int
    finish_reason: str
    rewards: Mapping[str, float]


@dataclass
class Rollouts:
    """`count` rollouts of each prompt. Row `i * count + j` is rollout j of prompt i: the order everywhere, whoever drew it.

    Every rank has numbers about all of them, and whole only those that its own engine drew.
    """

    samples: list[Sample]
    count: int
    facts: np.ndarray  # FACTS [rows]
    held: dict[int, Rollout]  # by row, of this rank's engine
    # Of a token's entry in `Rollout.experts`, [layers, experts per token]; None: there are none.
    experts: np.dtype | None = None
    columns: tuple[str, ...] = ()  # of the rewards
    # float64 [rows, columns]; NaN: it has no value
    rewards: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def prompt_lengths(self) -> np.ndarray:
        """int64 [rows], in tokens."""
        return np.repeat(np.array([len(sample.prompt_ids) for sample in self.samples], dtype=np.int64), self.count)

    @property
    def truncated(self) -> Tensor:
        """bool [samples, count]: those that were cut at the token limit."""
        return torch.from_numpy(self.facts["truncated"].copy()).view(len(self.samples), self.count)

    def sample(self, row: int) -> Sample:
        return self.samples[row // self.count]

    def finish_reason(self, row: int) -> str:
        return "length" if self.facts["truncated"][row] else "stop"

    def rewards_of(self, row: int) -> dict[str, float]:
        return dict(zip(self.columns, self.rewards[row].tolist(), strict=True))

    def outcomes(self) -> list[Outcome]:
        return [
            ScoredLength(self.sample(row).id, length, self.finish_reason(row), self.rewards_of(row))
            for row, length in enumerate(self.facts["length"].tolist())
        ]

    def of_prompts(self, chosen: Sequence[int]) -> Rollouts:
        """The groups of these prompts, in this order."""
        rows = [i * self.count + j for i in chosen for j in range(self.count)]
        held = {new: self.held[old] for new, old in enumerate(rows) if old in self.held}
        facts = self.facts[rows]
        facts["row"] = np.arange(len(rows))
        return replace(
            self, samples=[self.samples[i] for i in chosen], facts=facts, held=held, rewards=self.rewards[rows]
        )

    def __add__(self, other: Rollouts) -> Rollouts:
        """Other prompts' after these."""
        facts = np.concatenate([self.facts, other.facts])
        facts["row"] = np.arange(len(facts))
        held = self.held | {len(self) + row: rollout for row, rollout in other.held.items()}
        rewards = np.concatenate([self.rewards, other.rewards])
        return replace(self, samples=self.samples + other.samples, facts=facts, held=held, rewards=rewards)


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


@dataclass
class TokenBatch:
    """Sequences of tokens, and which of these the actor scores or trains on: the same for RL, SFT and the sync check."""

    lengths: Sequence[int]  # of every sequence, in tokens
    tokens: Mapping[int, np.ndarray]  # int64 [tokens], of the sequences that this rank computes on
    loss_mask: Mapping[int, np.ndarray]  # bool [tokens]; False for a sequence's first token, which has no predictor
    experts: Mapping[int, np.ndarray] = field(default_factory=dict)  # see `Rollout.experts`; {}: not replayed
    shift: int = 1  # a scored token's output is that of the token so many before it; 0: its own, a reward model's
    images: Mapping[int, PromptImages] = field(default_factory=dict)  # of sequences that begin with such a prompt

    @classmethod
    def of(
        cls, lengths: Sequence[int], rollouts: Mapping[int, Rollout], samples: Mapping[int, Sample] | None = None
    ) -> TokenBatch:
        """Whole rollouts; their sampled tokens are scored. `rollouts`: those that this rank computes on; `samples`: of
        their prompts, where these may have images."""
        return cls(
            lengths,
            {row: rollout.tokens for row, rollout in rollouts.items()},
            {row: rollout.loss_mask for row, rollout in rollouts.items()},
            {row: rollout.experts for row, rollout in rollouts.items() if rollout.experts is not None},
            images={row: sample.images for row, sample in (samples or {}).items() if sample.images is not None},
        )

    @classmethod
    def continuations(
        cls,
        parts: Iterable[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]],
        images: Sequence[PromptImages | None] = (),
    ) -> TokenBatch:
        """(what is given, what is scored) of every sequence, and the images in it, all of them known to every rank."""
        tokens, loss_mask = dict[int, np.ndarray](), dict[int, np.ndarray]()
        for row, (given, scored) in enumerate(parts):
            tokens[row] = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in (given, scored)])
            loss_mask[row] = np.arange(len(given) + len(scored)) >= len(given)
        seen = {row: own for row, own in enumerate(images) if own is not None}
        return cls([len(ids) for ids in tokens.values()], tokens, loss_mask, images=seen)

    @classmethod
    def ends(cls, sequences: Iterable[Sequence[int] | np.ndarray]) -> TokenBatch:
        """Whole sequences, each scored by its last token's output; all of them known to every rank."""
        tokens = {row: np.asarray(ids, dtype=np.int64) for row, ids in enumerate(sequences)}
        last = {row: np.arange(len(ids)) == len(ids) - 1 for row, ids in tokens.items()}
        return cls([len(ids) for ids in tokens.values()], tokens, last, shift=0)

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass
class TrainBatch:
    """The rollouts of one step that are trained on, one entry each."""

    sequences: TokenBatch
    rollout_logprobs: Mapping[int, np.ndarray]  # float32 [sampled tokens], from the engine; of those that this rank has
    advantages: np.ndarray  # float32 [rollouts]
    group: np.ndarray  # int64 [rollouts]: index of the prompt within the step

    def __len__(self) -> int:
        return len(self.sequences)
