"""vLLM's batch-invariant kernels for a GPU, which with `rollout.exact` the actor calls, too. Written for 0.32.

With `VLLM_BATCH_INVARIANT` the engine's linear layers call `linear_batch_invariant` by themselves, and its attention takes
`unified_attention`'s kernel that reads the keys in order, as here: a row has the same bits in every batch.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.determinism import batch_invariant_configs as configs
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from megatron_rl.base import exact_rows as exact
from megatron_rl.seams import check_parameters, replaced

LINEAR = "input weight bias"
UNTUNED = {"_TUNED_MATMUL_CONFIGS_RESOLVED": True, "_TUNED_MATMUL_CONFIGS_FOR_DEVICE": None}
_TILE = 128  # keys, a multiple of what the kernel takes at once: it reads the table to the end of its last tile


def use() -> None:
    """From here on `exact.linear` and `exact.product` are vLLM's, and `exact.row_sums` adds by halves.

    For shapes that it has tuned vLLM would take narrower tiles for few rows, and with them other instructions of a card
    (`mma.sync` below 64 rows, else `wgmma`), of whose roundings nothing is known: all products take the same tiles instead.
    """
    check_parameters(batch_invariant.linear_batch_invariant, LINEAR)
    check_parameters(configs.resolve_tuned_matmul_configs, "")
    for name, value in UNTUNED.items():
        getattr(configs, name)  # an error, if it has another name since
        setattr(configs, name, value)
    exact.gpu_linear = batch_invariant.linear_batch_invariant


def without_replaced_operators() -> contextlib.AbstractContextManager[None]:
    """Around the start of an engine, which would replace torch's softmax, means and batched products on the device, for the
    whole process and so for the actor. Nothing that is compared computes with them."""
    return replaced(batch_invariant, "enable_batch_invariant_mode", lambda: None, "")


def attend(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, longest: int, scale: float
) -> Tensor:
    """Causal attention of packed sequences, of which the queries are the last tokens; each key is a page of its own.

    Args:
        query: [queries, heads, d]. key, value: [keys, kv heads, d].
        queries, keys: int64 [sequences + 1], where each sequence's begin. longest: no sequence has more keys.
    """
    places = torch.arange(longest + -longest % _TILE, device=query.device)
    table = (keys[:-1, None] + places).clamp(max=len(key) - 1).to(torch.int32)
    out = torch.empty_like(query)
    unified_attention(
        q=query.contiguous(),
        k=key[:, None],
        v=value[:, None],
        out=out,
        cu_seqlens_q=queries.to(torch.int32),
        max_seqlen_q=longest,
        seqused_k=keys.diff().to(torch.int32),
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1),
        block_table=table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return out


def attend_from(query: Tensor, keys: Tensor, first: int) -> Tensor:
    """Attends as `exact.check_machine` asks for."""
    seen = first + len(query)
    packed, both = (torch.cat([keys[:1], rows]).view(len(rows) + 1, -1, 32) for rows in (query, keys[:seen]))
    queries, all_keys = (torch.tensor([0, 1, 1 + count], device=keys.device) for count in (len(query), seen))
    return attend(packed, both, both, queries, all_keys, seen, 0.2)[1:]
