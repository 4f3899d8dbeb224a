"""Batches of tokens: what the actor scores, and what it trains on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.data.images import PromptImages
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample


@dataclass
class TokenBatch:
    """Sequences of tokens, and which of these the actor scores or trains on: the same for RL, SFT and the sync check.

    A rollout is one entry, also where it has several sequences (`sequence_lengths`): they are computed in one micro-batch,
    where each attends to itself only, and the loss sees the rollout as one.
    """

    lengths: Sequence[int]  # of every entry, in tokens
    tokens: Mapping[int, np.ndarray]  # int64 [tokens], of the sequences that this rank computes on
    loss_mask: Mapping[int, np.ndarray]  # bool [tokens]; False for a sequence's first token, which has no predictor
    experts: Mapping[int, np.ndarray] = field(default_factory=dict)  # see `Rollout.experts`; {}: not replayed
    shift: int = 1  # a scored token's output is that of the token so many before it; 0: its own, a reward model's
    images: Mapping[int, PromptImages] = field(default_factory=dict)  # of sequences that begin with such a prompt
    sequence_lengths: Mapping[int, Sequence[int]] = field(
        default_factory=dict
    )  # tokens of each sequence, of entries with several

    @classmethod
    def of(
        cls, lengths: Sequence[int], rollouts: Mapping[int, Rollout], samples: Mapping[int, Sample] | None = None
    ) -> TokenBatch:
        """Whole rollouts; their sampled tokens are scored. `rollouts`: those that this rank computes on; `samples`: of
        their prompts, where these may have images."""
        lengths_of = {row: rollout.sequence_lengths for row, rollout in rollouts.items()}
        return cls(
            lengths,
            {row: rollout.tokens for row, rollout in rollouts.items()},
            {row: rollout.loss_mask for row, rollout in rollouts.items()},
            {row: rollout.experts for row, rollout in rollouts.items() if rollout.experts is not None},
            images={row: sample.images for row, sample in (samples or {}).items() if sample.images is not None},
            sequence_lengths={row: lengths for row, lengths in lengths_of.items() if len(lengths) > 1},
        )

    @classmethod
    def continuations(
        cls,
        parts: Iterable[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]],
        images: Sequence[PromptImages | None] = (),
        experts: Sequence[np.ndarray] = (),
    ) -> TokenBatch:
        """(what is given, what is scored) of every sequence, the images in it, and the experts that its tokens go to; all of
        them known to every rank."""
        tokens, loss_mask = dict[int, np.ndarray](), dict[int, np.ndarray]()
        for row, (given, scored) in enumerate(parts):
            tokens[row] = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in (given, scored)])
            loss_mask[row] = np.arange(len(given) + len(scored)) >= len(given)
        seen = {row: own for row, own in enumerate(images) if own is not None}
        return cls([len(ids) for ids in tokens.values()], tokens, loss_mask, dict(enumerate(experts)), images=seen)

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
    advantages: Mapping[int, np.ndarray]  # float32 [sampled tokens]; of those that this rank has
    group: np.ndarray  # int64 [rollouts]: index of the prompt within the step
    by_token: bool = False  # tokens of a rollout may have different advantages: a token part's, or their turns'

    def __len__(self) -> int:
        return len(self.sequences)
