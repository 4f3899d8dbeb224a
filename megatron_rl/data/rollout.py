"""A rollout, and what every rank knows of all rollouts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.sample import Message, Sample


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a rollout with one author: the prompt, one turn of the policy, or what is between two."""

    ids: np.ndarray  # int64 [tokens]; a turn's end-of-sequence token is included where it was drawn
    logprobs: np.ndarray | None = None  # float32 [tokens], under the engine's sampling distribution; None: not sampled
    version: int = 0  # optimizer steps behind the weights that drew the tokens
    # It begins a further sequence of the rollout, and was not sampled: tokens that an earlier sequence has trained on are
    # given here, so that each is trained on once.
    begins_sequence: bool = False


@dataclass
class Rollout:
    """One response to a prompt, token by token as the engine drew it. Only sampled tokens are trained on.

    A conversation that parted has several sequences. They lie one behind the other in `segments`, and the rollout is one
    whatever their number: arrays of its tokens run over all of them.
    """

    sample_id: str
    index: int  # 0 .. group_size - 1 within its prompt
    segments: list[Segment]  # the prompt first; of all sequences
    finish_reason: str  # stop | length
    experts: np.ndarray | None = None  # uint8 or uint16 [tokens, layers, experts per token] that the engine chose
    # The whole conversation, where an agent held one, up to its last turn; else the response, once it is decoded.
    messages: list[Message] = field(default_factory=list)
    # Where it has several sequences: the conversation of each, in their order, that in `messages` too; else [].
    conversations: list[list[Message]] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # one number per reward column; NaN: it has no value
    token_rewards: np.ndarray | None = (
        None  # float32 [sampled tokens, columns]; NaN: a column has no value. None: no columns
    )
    last_turn: str | None = None  # of a conversation, as the policy wrote it; None: it is in `messages`
    agent_rewards: Mapping[str, float] = field(default_factory=dict)  # what the agent returned, by column
    # Of those of `agent_rewards` that are sums: each turn's, in the order in which the turns were asked for.
    turn_rewards: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # Who broke the conversation off. After the infrastructure it has no tokens behind the prompt, and no rewards.
    failed_by: Literal["model", "infrastructure"] | None = None

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
    def sequence_lengths(self) -> list[int]:
        """Tokens of each of its sequences."""
        lengths = [0]
        for segment in self.segments:
            if segment.begins_sequence:
                lengths.append(0)
            lengths[-1] += len(segment.ids)
        return lengths

    @property
    def spoken(self) -> list[tuple[list[Message], dict[int, int]]]:
        """The messages of each sequence of a conversation, and sampled tokens of those that the policy wrote in it, by index.
        What an earlier sequence has drawn, or was written by others, has none."""
        drawn = list[list[int]]([[]])
        for segment in self.segments:
            if segment.begins_sequence:
                drawn.append([])
            if segment.logprobs is not None:
                drawn[-1].append(len(segment.ids))
        spoken = []
        for messages, lengths in zip(self.conversations or [self.messages], drawn, strict=True):
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            spoken.append((messages, dict(zip(turns[-len(lengths) :], lengths, strict=False))))
        return spoken

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return len(self.response_ids)

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        """Sampled tokens of each turn, in the order of `segments`."""
        return tuple(len(segment.ids) for segment in self.segments if segment.logprobs is not None)

    @property
    def version(self) -> int:
        """Optimizer steps behind the oldest weights that drew a part of it; -1: no part was drawn."""
        return min((segment.version for segment in self.segments if segment.logprobs is not None), default=-1)

    @property
    def is_conversation(self) -> bool:
        """Whether an agent held it; it is then whole only with its messages."""
        return bool(self.messages) and self.messages[0]["role"] != "assistant"

    @property
    def text(self) -> str:
        """The policy's last turn, which rewards read as the completion; empty until it is decoded."""
        if self.last_turn is not None:
            return self.last_turn
        return str(self.messages[-1]["content"]) if self.messages else ""

    @text.setter
    def text(self, content: str) -> None:
        self.messages = [{"role": "assistant", "content": content}]


def scored_sample(sample: Sample, rollout: Rollout) -> Sample:
    """The sample as rewards of this rollout get it: with its conversation, where an agent held one."""
    if sample.agent is None:
        return sample
    return replace(sample, messages=rollout.messages, agent_rewards=rollout.agent_rewards)


def _concatenate(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


FACTS = np.dtype(
    [
        ("row", "<i4"),
        ("num_tokens", "<i4"),  # of all sequences, prompt included
        ("length", "<i4"),  # sampled tokens
        ("truncated", "?"),  # cut at the token limit
        ("version", "<i8"),  # see `Rollout.version`; that of each segment goes with the tokens
        ("lost", "?"),  # to a failure of the infrastructure: it takes no part in its group
        # The rank that hands the rollout to others, one that has its token rewards where there are any; or UNANSWERED.
        ("source", "<i4"),
    ]
)
"""What every rank knows of every rollout."""
UNANSWERED = -1
"""In the place of a rank: nobody has the rollout, since a served model did not answer (in an evaluation only)."""


class Outcome(Protocol):
    """The part of a rollout that an evaluation's statistics read."""

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


class Turns(NamedTuple):
    """Turns of a conversation of one sequence, as every rank knows them where each has an advantage of its own.

    `lengths`: drawn tokens of each. `rewards`: of each, by the agent's columns that have them; None: the policy broke it off.
    """

    lengths: tuple[int, ...]
    rewards: Mapping[str, tuple[float, ...]] | None


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
    drawn: int | None = None  # tokens that were drawn for them in the step; None: all of theirs
    columns: tuple[str, ...] = ()  # of the rewards
    # float64 [rows, columns]; NaN: it has no value
    rewards: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    token_weights: Mapping[str, float] = field(
        default_factory=dict
    )  # of the columns of `Rollout.token_rewards`, in order
    # By row, of conversations that were not lost; None: turns have no advantages of their own.
    turns: Mapping[int, Turns] | None = None

    @classmethod
    def unbegun(cls, samples: Sequence[Sample], count: int) -> Rollouts:
        """Rollouts without tokens behind their prompts, which nobody has."""
        facts = np.zeros(len(samples) * count, dtype=FACTS)
        facts["row"], facts["truncated"] = np.arange(len(facts)), True
        facts["source"], facts["version"] = UNANSWERED, -1
        facts["num_tokens"] = np.repeat([len(sample.prompt_ids) for sample in samples], count)
        return cls([*samples], count, facts, {})

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

    @property
    def unanswered(self) -> int:
        """Rollouts that nobody has, see UNANSWERED; and conversations that were lost."""
        return int(((self.facts["source"] == UNANSWERED) | self.facts["lost"]).sum())

    @property
    def lost(self) -> Tensor:
        """bool [samples, count]: conversations lost to a failure of the infrastructure."""
        return torch.from_numpy(self.facts["lost"].copy()).view(len(self.samples), self.count)

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
            if self.facts["source"][row] != UNANSWERED and not self.facts["lost"][row]
        ]

    def of_prompts(self, chosen: Sequence[int]) -> Rollouts:
        """The groups of these prompts, in this order."""
        rows = [i * self.count + j for i in chosen for j in range(self.count)]
        held = {new: self.held[old] for new, old in enumerate(rows) if old in self.held}
        facts = self.facts[rows]
        facts["row"] = np.arange(len(rows))
        samples = [self.samples[i] for i in chosen]
        rewards = self.rewards[rows] if len(self.rewards) else self.rewards  # they may not be scored yet
        turns = self.turns and {new: self.turns[old] for new, old in enumerate(rows) if old in self.turns}
        return replace(self, samples=samples, facts=facts, held=held, rewards=rewards, turns=turns)

    def __add__(self, other: Rollouts) -> Rollouts:
        """Other prompts' after these."""
        facts = np.concatenate([self.facts, other.facts])
        facts["row"] = np.arange(len(facts))
        held = self.held | {len(self) + row: rollout for row, rollout in other.held.items()}
        rewards, turns = np.concatenate([self.rewards, other.rewards]), self.turns
        if turns is not None:
            turns = {**turns, **{len(self) + row: each for row, each in (other.turns or {}).items()}}
        samples = self.samples + other.samples
        return replace(self, samples=samples, facts=facts, held=held, rewards=rewards, turns=turns)
