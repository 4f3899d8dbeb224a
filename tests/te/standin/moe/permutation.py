"""Tokens into the order of their experts and back: `transformer_engine.pytorch.triton.permutation`.

A map of rows is [tokens, 2 experts + 1], as Transformer Engine's Python counts on. Here its first columns say where the
token's copy for an expert lies in the permuted order, and all that is left is -1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Rows of the permuted order lie by expert, then by token."""
    routed = routing_map.bool()
    order = routed.T.flatten().cumsum(0).view(num_experts, num_tokens).T - 1
    rows = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32)
    rows[:, :num_experts] = torch.where(routed, order, -1)
    return rows


def _pairs(row_id_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(token, expert, row) of every copy of a token, by row."""
    tokens, experts = (row_id_map >= 0).nonzero(as_tuple=True)
    rows = row_id_map[tokens, experts].long()
    order = rows.argsort()
    return tokens[order], experts[order], rows[order]


def _no_padding(pad_offsets: Tensor | None) -> None:
    if pad_offsets is not None:
        raise NotImplementedError("the stand-in permutes without padding experts' rows")


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rows, their scales (of quantised rows) and their probabilities, permuted."""
    _no_padding(pad_offsets)
    tokens, experts, _ = _pairs(row_id_map)
    if len(tokens) != num_out_tokens:
        raise ValueError(f"{len(tokens)} copies of tokens are routed, but the caller makes room for {num_out_tokens}")
    return (
        inp.view(torch.uint8)[tokens].view(inp.dtype) if inp.element_size() == 1 else inp[tokens],
        None if scale is None else scale[tokens],
        None if probs is None else probs[tokens, experts],
    )


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Each token's rows added up in fp32, weighted where asked; and the probabilities' [tokens, experts]."""
    _no_padding(pad_offsets)
    tokens, experts, rows = _pairs(row_id_map)
    values = inp[rows].float()
    if merging_probs is not None:
        values = values * merging_probs[tokens, experts].float()[:, None]
    output = torch.zeros(num_tokens, hidden_size).index_add(0, tokens, values).to(inp.dtype)
    if permuted_probs is None:
        return output, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = permuted_probs[rows]
    return output, probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the weights."""
    _no_padding(pad_offsets)
    tokens, experts, rows = _pairs(row_id_map)
    grads = fwd_output_grad[tokens].float()
    act_grad = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    act_grad[rows] = (grads * merging_probs[tokens, experts].float()[:, None]).to(act_grad.dtype)
    probs_grad = merging_probs.new_zeros(num_tokens, num_experts)
    probs_grad[tokens, experts] = (grads * fwd_input[rows].float()).sum(-1).to(probs_grad.dtype)
    return act_grad, probs_grad


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """Where each row goes when chunks of these sizes are put into this order."""
    starts = (split_sizes.cumsum(0) - split_sizes).tolist()
    sizes = split_sizes.tolist()
    source = torch.cat([torch.arange(starts[i], starts[i] + sizes[i]) for i in sorted_indices.tolist()])
    return torch.empty(num_tokens, dtype=torch.int32).index_copy(0, source, torch.arange(num_tokens, dtype=torch.int32))


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows and probabilities, moved; or moved back."""
    rows = row_id_map.long()
    order = rows.argsort() if is_forward else rows
    return inp[order], None if probs is None else probs[order]
