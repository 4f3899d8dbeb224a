"""A decoder's operations, each row computed by itself: its bits depend on nothing that stands beside it in a batch.

The actor and the engine both call these with `rollout.exact` (`seams.megatron_exact`, `seams.vllm_exact`), so that the same
sequence has the same log-probs in both, in whatever batch and packing. A matrix product of torch's on a CPU rounds otherwise
for a few rows than for many, and silu otherwise in the last elements of a tensor. So products are called with a fixed number
of rows, attention goes over fixed blocks of a sequence's keys, and the rest is made of operations that round each element
alike wherever it stands: sums, products, quotients, square roots, exp and log. `check_machine` asks whether it is so here.

On a GPU products and attention are vLLM's (`seams.vllm_invariant`), and the rest is this.

On a CPU all of it is computed in float32, and rounded to the inputs' dtype where an operation ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 64  # of one matrix product
KEYS = 32  # that one product of attention takes; an engine's pages hold a multiple
gpu_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None  # of a process with a GPU


# ------------------------------------------------------------------------------------------------------------- products
def product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weight.T: [..., k] and [n, k] -> [..., n], in the dtype of `x`."""
    if gpu_linear is not None:
        return gpu_linear(x, weight, None)
    rows, factor = x.reshape(-1, x.shape[-1]).float(), weight.float().t()
    out = rows.new_empty(len(rows), factor.shape[1])
    whole = len(rows) - len(rows) % ROWS
    for start in range(0, whole, ROWS):
        torch.mm(rows[start : start + ROWS], factor, out=out[start : start + ROWS])
    if rest := len(rows) - whole:
        block = F.pad(rows[whole:], (0, 0, 0, ROWS - rest))
        out[whole:] = torch.mm(block, factor)[:rest]
    return out.to(x.dtype).view(*x.shape[:-1], len(weight))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `product` in the dtype of `x`, and then adds the bias [n]: [..., k] -> [..., n]."""
    if gpu_linear is not None:
        return gpu_linear(x, weight, bias)
    out = product(x, weight)
    return out if bias is None else out + bias


def row_sums(x: Tensor) -> Tensor:
    """Sums each row: [rows, n] -> [rows]. torch would sum a single long row in parts, one for each thread."""
    if gpu_linear is not None:  # torch's sum of a row has another order where there are few
        x = F.pad(x, (0, (1 << (x.shape[1] - 1).bit_length()) - x.shape[1]))
        while (half := x.shape[1] // 2) > 0:
            x = x[:, :half] + x[:, half:]
        return x[:, 0]
    return torch.cat([x, x]).sum(dim=-1)[:1] if len(x) == 1 else x.sum(dim=-1)


# ---------------------------------------------------------------------------------------------------- norm, activation
class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = torch.rsqrt((row_sums(rows * rows) / rows.shape[1]).add_(eps))[:, None]
        ctx.save_for_backward(x, weight, scale)
        return (rows * scale).mul_(weight.float()).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.reshape(-1, x.shape[-1]).float() * scale
        of_rows = grad.reshape(normed.shape).float()
        of_weight = torch.einsum("rn,rn->n", of_rows, normed)
        of_normed = of_rows * weight.float()
        along = torch.linalg.vecdot(of_normed, normed)[:, None] / normed.shape[1]
        of_x = (of_normed - normed * along).mul_(scale)
        return of_x.to(x.dtype).view(x.shape), of_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension of [..., n] by its root mean square (Zhang and Sennrich 2019); differentiable."""
    return _RmsNorm.apply(x, weight, eps)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        values = x.float()
        return (values / values.neg().exp_().add_(1.0)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


def silu(x: Tensor) -> Tensor:
    """Returns x / (1 + exp(-x)) of each element; differentiable."""
    return _Silu.apply(x)


# -------------------------------------------------------------------------------------------------------------- rotation
def rotary_table(frequencies: Tensor, positions: int) -> Tensor:
    """Returns float32 [positions, 2 f]: cosines, then sines, of position x frequency. `frequencies`: float32 [f]."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turns the first 2 f numbers of every head by its token's row of `rotary_table` (Su et al. 2021, pairs (i, i + f)).

    Args:
        x: [tokens, heads, d]. turns: float32 [tokens, 2 f].
    """
    cos, sin = turns[:, None].chunk(2, dim=-1)
    first, second, rest = x.float().split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return torch.cat(turned, dim=-1).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------- attention
@dataclass(frozen=True)
class Items:
    """The queries of packed sequences in items of a few of one sequence, those that see the most keys first.

    Attributes:
        sequences: int64 [items].
        tokens: int64 [items, queries of an item]: where each is among all; the first of an item fills it up.
        positions: int64 [items, queries of an item]: of each in its sequence; it sees the keys up to there.
        used: queries in the fullest item.
        place: int64 [tokens]: item x `used` + query.
        counts: of each block of keys, how many items see some of it, and how many of them, from the first, all of it.
    """

    sequences: Tensor
    tokens: Tensor
    positions: Tensor
    used: int
    place: Tensor
    counts: Sequence[tuple[int, int]]

    @staticmethod
    def of(queries: Tensor, keys: Tensor, size: int) -> Items:
        """`queries`, `keys`: int64 [sequences], how many each has; the queries are its last tokens. `size`: of an item."""
        per_sequence = (queries + size - 1) // size
        sequences = torch.arange(len(queries)).repeat_interleave(per_sequence)
        first = size * (torch.arange(len(sequences)) - (per_sequence.cumsum(0) - per_sequence)[sequences])
        offsets = first[:, None] + torch.arange(size)
        is_own = offsets < queries[sequences, None]
        offsets = torch.where(is_own, offsets, first[:, None])
        positions = offsets + (keys - queries)[sequences, None]
        lowest, highest = positions.aminmax(dim=1)
        order = highest.argsort(descending=True, stable=True)
        sequences, lowest, highest, is_own = sequences[order], lowest[order], highest[order], is_own[order]
        tokens = offsets[order] + (queries.cumsum(0) - queries)[sequences, None]
        used = int(queries.clamp(max=size).max())
        place_of_token = torch.empty(int(queries.sum()), dtype=torch.int64)
        place_of_token[tokens[is_own]] = torch.arange(len(order) * used).view(-1, used)[is_own[:, :used]]
        counts = []
        for begin in range(0, int(highest[0]) + 1, KEYS):
            whole = (lowest >= begin + KEYS - 1).long().cumprod(dim=0).sum()
            counts.append((int((highest >= begin).sum()), int(whole)))
        return Items(sequences, tokens, positions[order], used, place_of_token, counts)


def queries_of_item(heads: int, kv_heads: int) -> int:
    """So many that a product has eight rows or more: of fewer than four, torch rounds them otherwise."""
    return -(-8 // (heads // kv_heads))


def attention(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, items: Items, scale: float
) -> Tensor:
    """Causal attention of packed queries to the keys of their sequences, which lie in pages (Dao et al. 2022, by blocks).

    Args:
        query: [tokens, heads, d].
        key_pages, value_pages: [pages, kv heads, tokens of a page, d].
        table: int64 [sequences, pages of each]: its pages, in order.

    Returns:
        [tokens, heads, d] in the dtype of `query`.
    """
    heads, width, kv_heads, page = query.shape[1], query.shape[2], key_pages.shape[1], key_pages.shape[2]
    (count, size), group = items.tokens.shape, heads // kv_heads
    used = items.used * group  # rows of an item that are somebody's
    q = query.float()[items.tokens].view(count, size, kv_heads, group, width).transpose(1, 2)
    q = q.reshape(count * kv_heads, size * group, width)
    weights = q.new_zeros(count * kv_heads, size * group, KEYS)  # rows that no query uses stay 0
    top = q.new_full((count * kv_heads, used), -torch.inf)
    total, out = torch.zeros_like(top), q.new_zeros(count * kv_heads, used, width)
    for block, (seeing, clear) in enumerate(items.counts):
        rows, begin = seeing * kv_heads, block * KEYS % page
        pages = table[items.sequences[:seeing], block * KEYS // page]
        keys, values = (
            side[:, :, begin : begin + KEYS].index_select(0, pages).float().view(rows, KEYS, width)
            for side in (key_pages, value_pages)
        )
        scores = torch.bmm(q[:rows], keys.transpose(1, 2))[:, :used].mul_(scale)
        if clear < seeing:
            places = torch.arange(block * KEYS, (block + 1) * KEYS)
            hidden = items.positions[clear:seeing, : items.used, None] < places
            bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            scores[clear * kv_heads :].view(-1, kv_heads, items.used, group, KEYS).add_(bias[:, None, :, None])
        highest = torch.maximum(top[:rows], scores.amax(dim=-1))
        weights[:rows, :used] = torch.exp(scores.sub_(highest[..., None]), out=scores)
        kept = (top[:rows] - highest).exp_()
        total[:rows].mul_(kept).add_(scores.sum(dim=-1))
        out[:rows].mul_(kept[..., None]).add_(torch.bmm(weights[:rows], values)[:, :used])
        top[:rows] = highest
    shape = (count, kv_heads, items.used, group)
    out = (out / total[..., None]).view(*shape, width).transpose(1, 2).reshape(-1, heads, width)
    return out[items.place].to(query.dtype)


# --------------------------------------------------------------------------------------------------------------- experts
def route(logits: Tensor, top_k: int, over_all: bool) -> tuple[Tensor, Tensor]:
    """Chooses a token's experts, those of the largest logits and of equal ones the first, and weighs them; differentiable.

    Args:
        logits: float32 [tokens, experts]. over_all: the softmax is over all of a token's experts, not its chosen ones alone.

    Returns:
        float32 and int64 [tokens, top_k], in the order of the experts.
    """
    experts = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(dim=-1).values
    chosen = logits.gather(1, experts)
    competing = logits if over_all else chosen
    top = competing.detach().amax(dim=-1, keepdim=True)
    return (chosen - top).exp() / row_sums((competing - top).exp())[:, None], experts


def add_expert(out: Tensor, rows: Tensor, of_expert: Tensor) -> Tensor:
    """Adds one expert's output [rows, n] to the tokens `rows` of [tokens, n]; experts are added in their order."""
    return out.index_add(0, rows, of_expert)


# ------------------------------------------------------------------------------------------------------------------ head
def normalizer(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest logit, and the sum of exp(logit - largest): float32 [tokens, rows of a shard] -> [tokens] each."""
    top = logits.amax(dim=-1)
    return top, row_sums((logits - top[:, None]).exp_())


def log_normalizer(shards: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns float32 [tokens]: the log of the sum of exp(logit) over all shards, of each one's `normalizer`, in order."""
    highest = shards[0][0]
    for top, _ in shards[1:]:
        highest = torch.maximum(highest, top)
    total = torch.zeros_like(highest)
    for top, of_shard in shards:
        total += of_shard * (top - highest).exp()
    return highest + total.log()


def log_softmax(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns float32 log-probs [tokens, vocabulary] of logits that are cut into shards of these sizes."""
    logits = logits.float()
    return logits - log_normalizer([normalizer(shard) for shard in logits.split(list(sizes), dim=-1)])[:, None]


# --------------------------------------------------------------------------------------------------------------- machine
def check_machine(
    attend_from: Callable[[Tensor, Tensor, int], Tensor] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    width: int = 96,
) -> list[str]:
    """Lists the operations that do not give a row the same bits in every batch on this machine; [] where all do.

    Each is computed of many rows and again of some of them.

    Args:
        attend_from: as `_attend_from`; None: that.
        device: None: the CPU.
        width: of a row, a larger multiple of 32.
    """
    chance, attend = torch.Generator().manual_seed(0), attend_from or _attend_from

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance).to(device, dtype)

    x, weight, turns = 3 * draw(3 * ROWS + 5, width), draw(width + 4, width), draw(3 * ROWS + 5, 32)
    by_rows: dict[str, Callable[[slice], Tensor]] = {
        "product": lambda rows: product(x[rows], weight),
        "rms_norm": lambda rows: rms_norm(x[rows], weight[0], 1e-6),
        "silu": lambda rows: silu(x[rows, 3:].contiguous()),
        "rotate": lambda rows: rotate(x[rows].view(-1, width // 32, 32), turns[rows]),
        "route": lambda rows: route(x[rows], 3, False)[0],
        "head": lambda rows: log_softmax(x[rows], [width - 32, 32]),
        "attention": lambda rows: attend(x[rows], x, rows.start),
    }
    slices = [slice(at, at + count) for at, count in ((0, 1), (3, 1), (ROWS - 1, 2), (5, 9), (ROWS, ROWS), (17, 133))]
    whole = {name: compute(slice(0, len(x))) for name, compute in by_rows.items()}
    return [
        name
        for name, compute in by_rows.items()
        if not all(torch.equal(compute(rows), whole[name][rows]) for rows in slices)
    ]


def _attend_from(query: Tensor, keys: Tensor, first: int) -> Tensor:
    """Attention of some of a sequence's tokens, heads of 32, beside a sequence of one token."""
    heads = keys.shape[1] // 32
    count = -(-len(keys) // KEYS)
    pages = F.pad(keys, (0, 0, 0, count * KEYS - len(keys))).view(count, KEYS, heads, 32).transpose(1, 2)
    table = torch.stack([torch.arange(count)] * 2)
    queries, seen = torch.tensor([1, len(query)]), torch.tensor([1, first + len(query)])
    items = Items.of(queries, seen, queries_of_item(heads, heads))
    packed = torch.cat([keys[:1], query]).view(-1, heads, 32)
    return attention(packed, pages, pages, table, items, 0.2)[1:]
