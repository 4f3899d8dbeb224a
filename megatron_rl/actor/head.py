"""Log-probs and entropy from hidden states, without ever holding the logits of all tokens.

The vocabulary is sharded over tensor-parallel ranks. A rank's logits exist one tile (tokens x rows of the output matrix) at
a time, in the forward pass and again in the backward pass, in memory that all tiles share: logits, and in their place
exp(logits) or their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.base import exact_rows as exact
from megatron_rl.seams.megatron import added_to_main_gradient, main_gradient

_LOWEST = -1e30  # of no real logit; finite, because inf - inf is NaN


@dataclass(frozen=True)
class VocabShard:
    """The rows of the output embedding that this rank holds."""

    start: int  # global index of the first row
    vocab_size: int  # rows that stand for a token; rows beyond it only pad the matrix and get probability 0
    group: dist.ProcessGroup | None  # tensor-parallel; None: this process has all rows


class _Tiles:
    """The logits of a rank, a tile at a time. Iterating gives (tokens, rows), those of the same rows after each other."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float, num_bytes: int, exactly: bool
    ) -> None:
        self.hidden, self.weight, self.temperature, self._exactly = hidden, weight, temperature, exactly
        self.num_rows = max(0, min(weight.shape[0], shard.vocab_size - shard.start))  # without padding
        elements = max(1, num_bytes // 4)
        # Square tiles read the least per product; where there are few tokens, more rows.
        self._tokens = max(1, min(len(hidden), elements // max(1, self.num_rows) if exactly else math.isqrt(elements)))
        self._rows = self.num_rows if exactly else max(1, min(self.num_rows, elements // self._tokens))
        self.one_per_row = self._tokens >= len(hidden)
        size = self._tokens * self._rows
        self._logits = hidden.new_empty(size, dtype=torch.float32)
        self._products = self._logits if hidden.dtype == torch.float32 else hidden.new_empty(size)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        for row in range(0, self.num_rows, self._rows):
            for token in range(0, len(self.hidden), self._tokens):
                yield (
                    slice(token, min(token + self._tokens, len(self.hidden))),
                    slice(row, min(row + self._rows, self.num_rows)),
                )

    def logits(self, tokens: slice, rows: slice) -> Tensor:
        """float32 [tokens, rows], valid until the next call; may be written to."""
        shape = (tokens.stop - tokens.start, rows.stop - rows.start)
        products = self._products[: shape[0] * shape[1]].view(shape)
        if self._exactly:
            products.copy_(exact.product(self.hidden[tokens], self.weight[rows]))
        else:
            torch.mm(self.hidden[tokens], self.weight[rows].t(), out=products)
        logits = self._logits[: products.numel()].view(shape)
        if logits.dtype != products.dtype:
            logits.copy_(products)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def as_factor(self, tile: Tensor) -> Tensor:
        """The result of `logits`, in the dtype of the matrices, to be multiplied with them."""
        if tile.dtype == self._products.dtype:
            return tile
        return self._products[: tile.numel()].view(tile.shape).copy_(tile)


def _places(targets: Tensor, first: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Where each target lies among the rows, int64 [tokens, 1], 0 where it does not; and whether it does, [tokens]."""
    local = targets - (first + rows.start)
    here = (local >= 0) & (local < rows.stop - rows.start)
    return (local * here)[:, None], here


def _adds_in_float32(device: torch.device) -> bool:
    """Whether torch has a product of narrower factors there that is added to a float32 sum: on GPUs only."""
    return device.type != "cpu"


def _accumulate(total: Tensor, left: Tensor, right: Tensor, first: bool = False) -> None:
    """total += left @ right; of the first product total = left @ right, whatever was there.

    Where `total` is float32 and the factors are not, a GPU's matrix product adds to it in float32. A CPU has no such
    product: there it is rounded to the factors' dtype before it is added.
    """
    beta = 0.0 if first else 1.0
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif _adds_in_float32(total.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    elif first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)


class _TiledLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        num_bytes: int,
        with_entropy: bool,
        exactly: bool,
    ) -> tuple[Tensor, Tensor | None]:
        tiles = _Tiles(hidden, weight, shard, temperature, num_bytes, exactly)
        # Per token, z the logits of the rows seen: largest z, sum of exp(z - largest), sum of exp(z - largest) (z - largest),
        # target's z.
        stats = hidden.new_zeros(4, len(hidden), dtype=torch.float32)
        stats[0] = _LOWEST
        for tokens, rows in tiles:
            tile = tiles.logits(tokens, rows)
            top, total, weighted, of_target = (row[tokens] for row in stats)
            place, here = _places(targets[tokens], shard.start, rows)
            of_target += tile.gather(1, place).squeeze(1) * here
            highest = torch.maximum(top, tile.amax(dim=1))
            _lower(top, total, weighted, highest)
            tile.sub_(highest[:, None]).exp_()
            total += exact.row_sums(tile) if exactly else tile.sum(dim=1)
            if with_entropy:  # -entr(exp(d)) = exp(d) d
                weighted -= torch.special.entr(tile, out=tile).sum(dim=1)
        if shard.group is not None and (size := dist.get_world_size(shard.group)) > 1:
            shards = [torch.empty_like(stats) for _ in range(size)]
            dist.all_gather(shards, stats, group=shard.group)
            parts = torch.stack(shards)
            highest = parts[:, 0].amax(dim=0)
            for part in parts:
                _lower(part[0], part[1], part[2], highest)
            stats = sum(parts.unbind(), torch.zeros_like(stats)) if exactly else parts.sum(dim=0)
            stats[0] = highest
        top, total, weighted, of_target = stats
        log_normalizer = top + total.log()
        log_probs = of_target - log_normalizer
        entropy = total.log() - weighted / total if with_entropy else None
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.shard, ctx.temperature, ctx.num_bytes = shard, temperature, num_bytes
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_normalizer)
        # d log-prob / dz = onehot - p, d entropy / dz = -p (log p + entropy); z = logits / temperature.
        of_target, of_p = grad_log_probs / ctx.temperature, -grad_log_probs / ctx.temperature
        of_entropy = -grad_entropy / ctx.temperature if grad_entropy is not None else None
        num_bytes = ctx.num_bytes // (1 if of_entropy is None else 2)
        tiles = _Tiles(hidden, weight, ctx.shard, ctx.temperature, num_bytes, False)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        main = main_gradient(weight) if for_weight else None
        grad_weight = weight.new_empty(weight.shape) if for_weight and main is None else None
        if grad_weight is not None:
            grad_weight[tiles.num_rows if len(hidden) else 0 :] = 0
        block = None  # a block of rows of grad_weight while the products of several tiles are added
        for tokens, rows in tiles:
            tile = tiles.logits(tokens, rows).sub_(log_normalizer[tokens, None])
            if of_entropy is None:
                tile.exp_().mul_(of_p[tokens, None])
            else:
                p = tile.exp()
                tile.add_(entropy[tokens, None]).mul_(of_entropy[tokens, None]).add_(of_p[tokens, None]).mul_(p)
                del p
            place, here = _places(targets[tokens], ctx.shard.start, rows)
            tile.scatter_add_(1, place, (of_target[tokens] * here)[:, None])
            factor = tiles.as_factor(tile)
            if grad_hidden is not None:
                _accumulate(grad_hidden[tokens], factor, weight[rows])
            if main is not None:
                _accumulate(main[rows], factor.t(), hidden[tokens])
            elif grad_weight is not None and (tiles.one_per_row or weight.dtype == torch.float32):
                _accumulate(grad_weight[rows], factor.t(), hidden[tokens], first=tokens.start == 0)
            elif grad_weight is not None:
                if block is None:
                    block = weight.new_empty(rows.stop - rows.start, weight.shape[1], dtype=torch.float32)
                part = block[: rows.stop - rows.start]
                _accumulate(part, factor.t(), hidden[tokens], first=tokens.start == 0)
                if tokens.stop == len(hidden):
                    grad_weight[rows] = part.to(weight.dtype)
        if main is not None:
            grad_weight = added_to_main_gradient(weight)
        return (
            grad_hidden.to(hidden.dtype) if grad_hidden is not None else None,
            grad_weight,
            *(None,) * 6,
        )


def _lower(top: Tensor, total: Tensor, weighted: Tensor, highest: Tensor) -> None:
    """Sums of exp(z - top) and exp(z - top) (z - top), per token, become those with `highest` >= top in its place."""
    scale = (top - highest).exp()
    weighted.add_(total * (top - highest)).mul_(scale)
    total.mul_(scale)
    top.copy_(highest)


def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    temperature: float = 1.0,
    num_bytes: int = 2**26,
    with_entropy: bool = False,
    exactly: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` under softmax(hidden @ weight.T / temperature), the vocabulary sharded over `shard.group`.

    Where Megatron-Core keeps an fp32 gradient of the weight, the gradient is added there.

    Args:
        hidden: [tokens, hidden size], the same on every rank of the group. Its gradient is this rank's share only: the
            sum over the group belongs to the caller (Megatron's `copy_to_tensor_model_parallel_region`).
        weight: [rows of this rank, hidden size].
        targets: int64 [tokens].
        temperature: > 0; the temperature the tokens were sampled at.
        num_bytes: of the float32 logits that exist at once. In another dtype there is a copy of half that size.
        with_entropy: also return the entropy in nats. Its gradient needs no more memory.
        exactly: by `base.exact_rows`.

    Returns:
        float32 [tokens] log-probs, and float32 [tokens] entropy or None. Both carry gradients.
    """
    return _TiledLogProbs.apply(hidden, weight, targets, shard, temperature, num_bytes, with_entropy, exactly)
