"""Log-probs and entropy from hidden states, without ever holding the logits of all tokens.

The vocabulary is sharded over tensor-parallel ranks. Logits exist for `chunk` tokens at a time, in the forward pass and
again in the backward pass, so the extra memory is chunk x vocabulary / TP instead of tokens x vocabulary / TP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """Which rows of the output embedding this rank holds."""

    start: int  # global index of the first row
    vocab_size: int  # rows that stand for a token; rows beyond it only pad the matrix and get probability 0
    group: dist.ProcessGroup | None  # tensor-parallel


def _logits(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float()
    if temperature != 1.0:
        logits = logits / temperature
    padding = shard.start + weight.shape[0] - shard.vocab_size
    if padding > 0:
        # Finite, because 0 * inf in the entropy would be NaN; far below any real logit, so its probability is exactly 0.
        logits[:, max(0, weight.shape[0] - padding) :] = -1e30
    return logits


def _local_targets(targets: Tensor, weight: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Row index of each target in this shard (0 where it lies elsewhere) and whether it lies here."""
    local = targets - shard.start
    here = (local >= 0) & (local < weight.shape[0])
    return local.where(here, torch.zeros_like(local)), here


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        num_tokens = hidden.shape[0]
        # Per token and rank: largest logit, sum of exp, sum of exp * logit, target's logit.
        stats = torch.zeros(4, num_tokens, dtype=torch.float32, device=hidden.device)
        for begin in range(0, num_tokens, chunk):
            part = slice(begin, begin + chunk)
            logits = _logits(hidden[part], weight, shard, temperature)
            local, here = _local_targets(targets[part], weight, shard)
            stats[3, part] = logits.gather(1, local[:, None]).squeeze(1).where(here, stats[3, part])
            top = logits.amax(dim=1)
            exp = (logits - top[:, None]).exp()
            stats[0, part], stats[1, part] = top, exp.sum(dim=1)
            if with_entropy:
                stats[2, part] = (exp * logits).sum(dim=1)
        size = dist.get_world_size(shard.group)
        if size > 1:
            shards = [torch.empty_like(stats) for _ in range(size)]
            dist.all_gather(shards, stats, group=shard.group)
            all_stats = torch.stack(shards)
        else:
            all_stats = stats[None]
        top = all_stats[:, 0].amax(dim=0)
        scale = (all_stats[:, 0] - top).exp()
        normalizer = (all_stats[:, 1] * scale).sum(dim=0)
        log_normalizer = top + normalizer.log()
        log_probs = all_stats[:, 3].sum(dim=0) - log_normalizer
        entropy = log_normalizer - (all_stats[:, 2] * scale).sum(dim=0) / normalizer if with_entropy else None
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.shard, ctx.temperature, ctx.chunk = shard, temperature, chunk
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor | None) -> Any:
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for begin in range(0, hidden.shape[0], ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            log_p = _logits(hidden[part], weight, ctx.shard, ctx.temperature) - log_normalizer[part, None]
            p = log_p.exp()
            grad_logits = -p * grad_log_probs[part, None]
            if entropy is not None and grad_entropy is not None:
                grad_logits -= grad_entropy[part, None] * p * (log_p + entropy[part, None])
            local, here = _local_targets(targets[part], weight, ctx.shard)
            grad_logits.scatter_add_(1, local[:, None], (grad_log_probs[part] * here)[:, None])
            grad_logits = (grad_logits / ctx.temperature).to(weight.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += grad_logits.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    temperature: float = 1.0,
    chunk: int = 2048,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` under softmax(hidden @ weight.T / temperature), the vocabulary sharded over `shard.group`.

    Args:
        hidden: [tokens, hidden size], the same on every rank of the group. Its gradient is this rank's share only: the
            sum over the group belongs to the caller (Megatron's `copy_to_tensor_model_parallel_region`).
        weight: [rows of this rank, hidden size].
        targets: int64 [tokens].
        temperature: > 0; the temperature the tokens were sampled at.
        chunk: tokens whose logits exist at once.
        with_entropy: also return the entropy in nats.

    Returns:
        float32 [tokens] log-probs, and float32 [tokens] entropy or None. Both carry gradients.
    """
    return _ChunkedLogProbs.apply(hidden, weight, targets, shard, temperature, chunk, with_entropy)
