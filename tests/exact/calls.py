"""vLLM's attention on a GPU as its engine calls it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata

LAYER: Any = SimpleNamespace(_q_scale=None, _k_scale=torch.ones(1), _v_scale=torch.ones(1))


def implementation(heads: int, kv_heads: int, width: int) -> TritonAttentionImpl:
    return TritonAttentionImpl(heads, width, width**-0.5, kv_heads, None, None, "auto")


def attend_as_the_engine(
    query: Tensor, cache: Tensor, table: Tensor, queries: Sequence[int], keys: Sequence[int]
) -> Tensor:
    """[tokens, heads, d], of a batch's queries and a cache that has their keys: [pages, kv heads, page, 2 d]."""
    some = torch.zeros(1)
    metadata = TritonAttentionMetadata(
        num_actual_tokens=len(query),
        max_query_len=max(queries),
        query_start_loc=torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
        max_seq_len=max(keys),
        seq_lens=torch.tensor(keys, dtype=torch.int32),
        block_table=table,
        slot_mapping=some,
        # What the engine has for another kernel, of parts of the keys at once, which it must not take.
        seq_threshold_3D=128,
        num_par_softmax_segments=16,
        softmax_segm_output=some,
        softmax_segm_max=some,
        softmax_segm_expsum=some,
        causal=True,
    )
    out = torch.empty_like(query)
    impl = implementation(query.shape[1], cache.shape[1], query.shape[2])
    impl.forward(LAYER, query, query, query, cache, metadata, out)
    return out
