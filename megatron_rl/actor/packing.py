"""Sequences into micro-batches: no padding, a token budget, balanced over data-parallel ranks.

Every function here is a pure function of the sequence lengths, so all ranks come to the same plan without talking.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from megatron_rl.data.batch import TokenBatch
from megatron_rl.data.images import PackedImages, PromptImages
from megatron_rl.modules.layers import held
from megatron_rl.weights.parallel import Axis

_FEW = 32  # sequences of a rank


@dataclass
class MicroBatch:
    """Packed sequences of one forward pass. `tokens` run over all of them; the other tensors over scored tokens only.

    A row of the batch is one or several of the sequences; the loss knows rows only.

    With context parallelism a rank has its part of every sequence's tokens (`held`), and all scored tokens.
    """

    rows: list[int]  # index of each entry in the batch it came from
    tokens: Tensor  # int64 [this rank's tokens]
    positions: Tensor  # int64 [this rank's tokens], counted from each sequence's start; with images [3, tokens]
    offsets: (
        Tensor  # int32 [sequences + 1], start of each whole sequence, padding included; the last may be all padding
    )
    longest: int
    predictors: Tensor  # int64 [own]: index in `tokens` of each position here whose output a scored token is read from
    own: Tensor  # int64 [own]: which scored tokens these are; without context parallelism all, in order
    targets: Tensor  # int64 [scored tokens]
    sequence_ids: Tensor  # int64 [scored tokens]: index into `rows`
    experts: np.ndarray | None = None  # [this rank's tokens, layers, experts per token] that the engine chose
    chosen_experts: dict[int, Tensor] = field(default_factory=dict)  # see `actor.routing`
    images: PackedImages | None = None

    def model_inputs(self) -> dict[str, object]:
        """Keyword arguments of Megatron's model."""
        return {
            "input_ids": self.tokens[None],
            "position_ids": self.positions[..., None, :],
            "attention_mask": None,
            "packed_seq_params": PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=self.offsets,
                cu_seqlens_kv=self.offsets,
                max_seqlen_q=self.longest,
                max_seqlen_kv=self.longest,
            ),
            **({} if self.images is None else {"images": self.images}),
        }

    def whole(self, own: Tensor, cp: Axis) -> Tensor:
        """One number per scored token, of those whose outputs this context-parallel rank has -> of all."""
        if cp.size == 1:
            return own
        spread = own.new_zeros(len(self.targets)).index_copy(0, self.own, own)
        return reduce_from_tensor_model_parallel_region(spread, group=cp.group)

    def places(self, lengths: Sequence[int], cp: int, cp_rank: int) -> np.ndarray:
        """Returns int64 [this rank's tokens]: each one's number among the tokens of all sequences of a batch, -1 of padding.

        Args:
            lengths: of the batch's entries, each one sequence.
        """
        starts = self.offsets.cpu().numpy()
        here = held(np.diff(starts).tolist(), cp, cp_rank)
        local = np.searchsorted(starts, here, side="right") - 1
        within = here - starts[local]
        own = np.array([lengths[row] for row in self.rows] + [0])  # the last: padding behind them
        first = np.cumsum([0, *lengths])[[*self.rows, 0]]
        return np.where(within < own[local], first[local] + within, -1)

    def concatenate(self, per_token: Mapping[int, np.ndarray]) -> Tensor:
        """Arrays by sequence of the batch -> float32 [scored tokens] of this micro-batch."""
        parts = [np.asarray(per_token[row], dtype=np.float32) for row in self.rows]
        flat = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
        return torch.as_tensor(flat, device=self.targets.device)


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices in `parts` lists of nearly equal total cost: longest first, each to the lightest list. Lists are sorted."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    lists: list[list[int]] = [[] for _ in range(parts)]
    totals = [(0.0, part) for part in range(parts)]  # a heap
    for i in order:
        total, lightest = totals[0]
        lists[lightest].append(i)
        heapq.heapreplace(totals, (total + costs[i], lightest))
    return [sorted(indices) for indices in lists]


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in the fewest bins that first-fit-decreasing finds with at most `budget` tokens each.

    Raises:
        ValueError: if one sequence alone is longer than the budget.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > budget:
            raise ValueError(
                f"a sequence of {lengths[i]} tokens does not fit `actor.tokens_per_microbatch` ({budget}); raise it to at "
                f"least rollout.max_prompt_tokens + rollout.max_tokens"
            )
        target = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if target is None:
            bins.append([i])
            room.append(budget - lengths[i])
        else:
            bins[target].append(i)
            room[target] -= lengths[i]
    return [sorted(indices) for indices in bins]


def even_attention(shares: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Shares whose sums of squared lengths differ less, by exchanges that take no share's tokens beyond 2 % over the mean.

    Steepest descent until none is over the mean by 5 %: of the two shares with the most, the exchange of two sequences (or
    the move of one) that lowers the sum of squares of all shares' sums most.
    """
    # After the sequences one of no length for each share: an exchange with it is a move.
    tokens = np.array([*lengths, *[0] * len(shares)], dtype=np.float64)
    owner = np.empty(len(tokens), dtype=np.int64)
    for share, indices in enumerate(shares):
        owner[[*indices, len(lengths) + share]] = share
    squares = tokens**2
    load, cost = (np.bincount(owner, weights, len(shares)) for weights in (tokens, squares))
    most = max(load.max(), 1.02 * load.mean())
    for _ in range(4 * len(tokens)):
        if cost.max() <= 1.05 * cost.mean():
            break
        for share in np.argsort(-cost, kind="stable")[:2]:
            mine, others = np.flatnonzero(owner == share), np.flatnonzero(owner != share)
            owners = owner[others]
            more_tokens = tokens[others] - tokens[mine][:, None]
            more_cost = squares[others] - squares[mine][:, None]
            change = more_cost * (cost[share] - cost[owners] + more_cost)
            fits = (load[share] + more_tokens <= most) & (load[owners] - more_tokens <= most)
            i, j = divmod(int(np.where(fits, change, 0).argmin()), len(others))
            if not fits[i, j] or change[i, j] >= 0:
                continue
            for loads, more in ((load, more_tokens[i, j]), (cost, more_cost[i, j])):
                loads[share] += more
                loads[owners[j]] -= more
            owner[mine[i]], owner[others[j]] = owners[j], share
            break
        else:
            break
    return [np.flatnonzero(owner[: len(lengths)] == share).tolist() for share in range(len(shares))]


def fewest_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in bins of at most `budget` tokens each: first-fit-decreasing's, or fewer where evenly filled bins fit."""
    bins = first_fit(lengths, budget)
    for count in range(math.ceil(sum(lengths) / budget), len(bins)):
        even = balance(lengths, count)
        if all(sum(lengths[i] for i in indices) <= budget for indices in even):
            return even
    return bins


def plan(lengths: Sequence[int], rows: Sequence[int], dp: int, budget: int, multiple: int = 1) -> list[list[list[int]]]:
    """Cuts a minibatch into micro-batches: `plan(...)[dp_rank][micro_batch]` is a list of rows.

    Every data-parallel rank gets the same number of micro-batches (pipelines and expert groups run in step), a multiple of
    `multiple`; where there is less work than that, some are empty.

    Args:
        lengths: tokens of every sequence of the batch; `rows` selects those of this minibatch.
    """
    chosen = [lengths[row] for row in rows]
    shares = balance(chosen, dp)
    if dp > 1 and len(rows) <= _FEW * dp:  # of more, sums of squares are even where sums are
        shares = even_attention(shares, chosen)
    bins = [fewest_bins([lengths[rows[i]] for i in share], budget) for share in shares]
    count = max(1, *(len(b) for b in bins))
    count += -count % multiple
    result = []
    for share, rank_bins in zip(shares, bins, strict=True):
        if len(rank_bins) < count:  # spread the work instead of leaving micro-batches empty
            rank_bins = balance([lengths[rows[i]] for i in share], count)
        result.append([[rows[share[i]] for i in indices] for indices in rank_bins])
    return result


@functools.lru_cache(maxsize=64)
def planned(
    lengths: tuple[int, ...], rows: tuple[int, ...], dp: int, budget: int, multiple: int
) -> list[list[list[int]]]:
    """`plan`, computed once for the exchange of rollouts and for their packing."""
    return plan(lengths, rows, dp, budget, multiple)


def pack(
    rows: Sequence[int],
    batch: TokenBatch,
    device: torch.device,
    multiple: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
) -> MicroBatch:
    """Packs the sequences of the entries `rows` of a batch, and takes this context-parallel rank's part.

    A rank's token count is padded to `multiple` with a sequence that nothing reads; with context parallelism each sequence
    is also padded at its end, where causal attention hides it, to what can be cut evenly.
    """
    cp_chunks = 2 * cp if cp > 1 else 1
    multiple = math.lcm(multiple * cp, cp_chunks)
    tokens, predictors, sequence_ids, lengths = [], [], [], []
    start = 0
    sequences = _sequences(rows, batch)
    for local, row, part in sequences:
        length, scored = part.stop - part.start, np.flatnonzero(batch.loss_mask[row][part])
        tokens += [batch.tokens[row][part], np.zeros(-length % cp_chunks, dtype=np.int64)]
        predictors.append(start + scored - batch.shift)
        sequence_ids.append(np.full(len(scored), local))
        lengths.append(length + -length % cp_chunks)
        start += lengths[-1]
    padding = -start % multiple if start else multiple
    if padding:
        tokens.append(np.zeros(padding, dtype=np.int64))
        lengths.append(padding)

    def join(parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def tensor(flat: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(flat, dtype=dtype, device=device)

    here = held(lengths, cp, cp_rank)
    place = np.full(sum(lengths), -1)
    place[here] = np.arange(len(here))
    predictor = place[join(predictors)]
    predicted_here = np.flatnonzero(predictor >= 0)
    return MicroBatch(
        rows=list(rows),
        tokens=tensor(join(tokens)[here]),
        positions=tensor(np.concatenate(_positions(sequences, batch, lengths), axis=-1)[..., here]),
        offsets=tensor(np.concatenate([[0], np.cumsum(lengths)]), torch.int32),
        longest=max(lengths),
        predictors=tensor(predictor[predicted_here]),
        own=tensor(predicted_here),
        targets=tensor(join([batch.tokens[row][batch.loss_mask[row]] for row in rows])),
        sequence_ids=tensor(join(sequence_ids)),
        experts=_experts(sequences, batch, lengths)[here] if batch.experts and rows else None,
        images=_images(sequences, batch, lengths, device),
    )


class _Sequence(NamedTuple):
    """One sequence of an entry."""

    local: int  # index of the entry in the micro-batch
    row: int  # in the batch
    part: slice  # of the entry's tokens


def _sequences(rows: Sequence[int], batch: TokenBatch) -> list[_Sequence]:
    sequences = []
    for local, row in enumerate(rows):
        end = 0
        for length in batch.sequence_lengths.get(row, (batch.lengths[row],)):
            sequences.append(_Sequence(local, row, slice(end, end + length)))
            end += length
    return sequences


def _positions(sequences: Sequence[_Sequence], batch: TokenBatch, lengths: Sequence[int]) -> list[np.ndarray]:
    """Positions of every sequence, int64 [its tokens], or [3, its tokens] where any of the micro-batch has images."""
    rows = [*(sequence.row for sequence in sequences), -1]  # the last of padding, where there is some
    if not batch.images.keys() & set(rows):
        return [np.arange(length) for length in lengths]
    return [
        batch.images[row].positions(length) if row in batch.images else np.tile(np.arange(length), (3, 1))
        for row, length in zip(rows, lengths, strict=False)
    ]


def _images(
    sequences: Sequence[_Sequence], batch: TokenBatch, lengths: Sequence[int], device: torch.device
) -> PackedImages | None:
    """A group's rollouts share their prompt's images, which the tower then reads once. One with images has one sequence."""
    first: dict[PromptImages, int] = {}  # of each prompt's image tokens among those of all prompts
    slots, sources, start, count = list[np.ndarray](), list[np.ndarray](), 0, 0
    for sequence, length in zip(sequences, lengths, strict=False):
        if (images := batch.images.get(sequence.row)) is not None:
            places = images.slots
            if images not in first:
                first[images] = count
                count += len(places)
            slots.append(start + places)
            sources.append(first[images] + np.arange(len(places)))
        start += length
    if not first:
        return None
    flat = (torch.as_tensor(np.concatenate(parts), device=device) for parts in (slots, sources))
    return PackedImages(list(first), *flat)


def _experts(sequences: Sequence[_Sequence], batch: TokenBatch, lengths: Sequence[int]) -> np.ndarray:
    """Returns the experts of all tokens of a micro-batch, [tokens, layers, experts per token]; padding takes other tokens'.

    Args:
        lengths: of each sequence, padded, and of padding behind them.
    """
    experts = []
    for sequence, length in zip(sequences, lengths, strict=False):
        whole, tokens = batch.experts[sequence.row], batch.lengths[sequence.row]
        if len(whole) != tokens:
            raise ValueError(f"sequence {sequence.row} has {tokens} tokens, and experts of {len(whole)}")
        own = whole[sequence.part]
        experts.append(np.resize(own, (length, *own.shape[1:])))
    return np.resize(np.concatenate(experts), (sum(lengths), *experts[0].shape[1:]))
