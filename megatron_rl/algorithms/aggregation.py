"""From one loss per token to one number, with denominators that belong to the whole minibatch.

Every mode is a sum over tokens with a coefficient each, so a minibatch gives the same sum and the same gradient however
it is cut into micro-batches and data-parallel ranks, as long as no rollout is cut itself.
"""

from __future__ import annotations

import typing
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.base.messages import unknown_name
from megatron_rl.config.algorithm import Aggregation


class Denominators(NamedTuple):
    """Sizes of a whole minibatch, over all micro-batches and data-parallel ranks: sums of `count_live` of the parts."""

    num_tokens: float | Tensor  # live tokens
    num_sequences: float | Tensor  # rollouts with at least one live token

    def __add__(self, other: object) -> Denominators:
        if not isinstance(other, Denominators):
            return NotImplemented
        return Denominators(self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences)


def sequence_sizes(mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Live tokens of every rollout of a packed micro-batch, float64 [rollouts]."""
    rollouts = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    sizes = torch.zeros(rollouts, dtype=torch.float64, device=mask.device)
    return sizes.index_add_(0, sequence_ids, mask.double())


def count_live(mask: Tensor, sequence_ids: Tensor) -> Denominators:
    """Counts of one part of the minibatch, scalar float64 tensors. Sum them over all parts to get the denominators.

    Args:
        mask: bool or 0/1 [tokens]; True where the token takes part in the loss (after all filters).
        sequence_ids: int64 [tokens], which rollout of this part each token belongs to.
    """
    sizes = sequence_sizes(mask, sequence_ids)
    return Denominators(sizes.sum(), (sizes > 0).sum().double())


def token_coefficients(
    mask: Tensor, sequence_ids: Tensor, mode: str, denominators: Denominators, max_length: int | None = None
) -> Tensor:
    """The factor of each token's loss before everything is summed, float64 [tokens]; 0 where masked.

    Args:
        mask, sequence_ids: as in `count_live`; whole rollouts only.
        mode: `token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum`, or `seq-mean-token-sum-norm`, which divides by
            num_sequences * max_length (Dr. GRPO).
        denominators: of the whole minibatch.
        max_length: tokens; only and always for `seq-mean-token-sum-norm`.

    Raises:
        ValueError: on an unknown mode, or a missing `max_length`.
    """
    if mode not in typing.get_args(Aggregation):
        raise ValueError(unknown_name("aggregation mode", mode, typing.get_args(Aggregation)))
    live = mask.double()
    if mode == "token-mean":
        return live / at_least_one(denominators.num_tokens)
    per_sequence = live / at_least_one(denominators.num_sequences)
    if mode == "seq-mean-token-mean":
        return per_sequence / sequence_sizes(mask, sequence_ids).clamp(min=1)[sequence_ids]
    if mode == "seq-mean-token-sum-norm":
        if max_length is None or max_length < 1:
            raise ValueError(f"seq-mean-token-sum-norm needs max_length >= 1 in tokens, not {max_length!r}")
        return per_sequence / max_length
    return per_sequence


def at_least_one(count: float | Tensor) -> float | Tensor:
    """A denominator that may count nothing."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(float(count), 1.0)


def aggregate_packed(
    token_loss: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    mode: str,
    denominators: Denominators,
    max_length: int | None = None,
) -> Tensor:
    """The packed twin of `aggregate_loss`: [tokens] -> scalar, of this part of the minibatch; parts add up.

    See `token_coefficients` for the arguments. Summed in float64; the result has at least float32.
    """
    coefficients = token_coefficients(mask, sequence_ids, mode, denominators, max_length)
    return weighted_sum(token_loss, coefficients).to(torch.promote_types(token_loss.dtype, torch.float32))


def weighted_sum(token_loss: Tensor, coefficients: Tensor) -> Tensor:
    """Sum of token_loss * coefficients, in float64. Where the coefficient is 0 the loss may be anything."""
    return (torch.where(coefficients != 0, token_loss.double(), 0.0) * coefficients).sum()


def aggregate_loss(
    token_loss: Tensor,
    mask: Tensor,
    mode: str,
    max_length: int | None = None,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
) -> Tensor:
    """Padded rows: token_loss [b, t], mask [b, t] -> scalar.

    Args:
        token_loss: loss per token; ignored where masked, whatever it holds.
        mask: bool or 0/1.
        mode: see `token_coefficients`.
        max_length: in tokens; for `seq-mean-token-sum-norm`.
        num_tokens, num_sequences: denominators of the whole minibatch. None: of this batch, where rows without a live
            token do not count.

    Raises:
        ValueError: on shapes that differ, an unknown mode, or a missing `max_length`.
    """
    if token_loss.shape != mask.shape or token_loss.dim() != 2:
        raise ValueError(
            f"token_loss and mask must both be [b, t], not {tuple(token_loss.shape)} and {tuple(mask.shape)}"
        )
    rows, columns = token_loss.shape
    sequence_ids = torch.arange(rows, device=mask.device).repeat_interleave(columns)
    flat = mask.reshape(-1).bool()
    own = count_live(flat, sequence_ids)
    denominators = Denominators(
        own.num_tokens if num_tokens is None else num_tokens,
        own.num_sequences if num_sequences is None else num_sequences,
    )
    return aggregate_packed(token_loss.reshape(-1), flat, sequence_ids, mode, denominators, max_length)
