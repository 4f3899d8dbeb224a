"""Cutting and merging tensors: pure functions, every family, every kind, every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.models import Model, model_of, padded_vocab_size
from megatron_rl.models.rules import Sharding, shard_shape
from megatron_rl.weights.gather import merge_shards

from .shards import shard_tensor

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "vocab_size": 61,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": SIZES | {"hidden_size": 64},  # vLLM takes heads of hidden_size / heads only
    "Qwen3ForCausalLM": SIZES,
    "Qwen3MoeForCausalLM": SIZES | MOE,
    "LlamaForCausalLM": SIZES | {"tie_word_embeddings": True},
    "MistralForCausalLM": SIZES | {"sliding_window": None},
}


def model(architecture: str, **changes: Any) -> Model:
    return model_of({"architectures": [architecture], **CONFIGS[architecture], **changes})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_merge_undoes_shard(architecture: str, kv_heads: int, tp: int) -> None:
    own = model(architecture, num_key_value_heads=kv_heads)
    generator = torch.Generator().manual_seed(0)
    names = []
    for rule in own.weights():
        full = {t.name: torch.randn(t.sizes(own.dims), generator=generator) for t in rule.hf}
        shards = [shard_tensor(rule, full, own.dims, rank, tp) for rank in range(tp)]
        assert {tuple(shard.shape) for shard in shards} == {shard_shape(rule, own.dims, tp)}
        merged = merge_shards(rule, shards, own.dims)
        assert merged.keys() == full.keys()
        assert all(torch.equal(merged[name], value) for name, value in full.items())
        names += merged
    assert len(names) == len(set(names))


def rule_of(architecture: str, sharding: Sharding, ndim: int = 2) -> tuple[Any, Any]:
    own = model(architecture)
    rules = [rule for rule in own.weights() if rule.sharding is sharding and len(rule.hf[0].shape) == ndim]
    return rules[0], own.dims


def test_qkv_is_interleaved_by_group() -> None:
    rule, dims = rule_of("Qwen2ForCausalLM", Sharding.QKV, ndim=1)
    q, k, v = torch.arange(64.0), 100 + torch.arange(16.0), 200 + torch.arange(16.0)
    full = dict(zip([t.name for t in rule.hf], (q, k, v), strict=True))
    # 2 groups of 4 query heads; heads of 8 rows
    expected = [torch.cat([q[32 * g : 32 * g + 32], k[8 * g : 8 * g + 8], v[8 * g : 8 * g + 8]]) for g in (0, 1)]
    for tp in (1, 2, 4):
        shards = [shard_tensor(rule, full, dims, rank, tp) for rank in range(tp)]
        assert torch.equal(torch.cat(shards), torch.cat(expected))


def test_the_shape_of_a_shard_takes_no_longer_for_a_large_model() -> None:
    """Recipe checks ask for it, also of a config.json with an absurd number of heads."""
    rule, dims = rule_of("Qwen2ForCausalLM", Sharding.QKV, ndim=1)
    heads = 2**60
    large = {**dims, "heads": heads, "kv_heads": heads, "q": heads * 8, "kv": heads * 8}
    assert shard_shape(rule, large, 2) == (3 * heads * 8 // 2,)


def test_gated_mlp_puts_each_ranks_gate_before_its_up() -> None:
    rule, dims = rule_of("Qwen3ForCausalLM", Sharding.GATED)
    gate, up = torch.randn(40, 24), torch.randn(40, 24)
    full = dict(zip([t.name for t in rule.hf], (gate, up), strict=True))
    assert torch.equal(shard_tensor(rule, full, dims, 1, 4), torch.cat([gate[10:20], up[10:20]]))


def test_row_parallel_cuts_columns() -> None:
    rule, dims = rule_of("Qwen3ForCausalLM", Sharding.ROW)
    full = torch.randn(24, 64)
    assert torch.equal(shard_tensor(rule, {rule.hf[0].name: full}, dims, 1, 2), full[:, 32:])


@pytest.mark.parametrize(("vocab", "padded"), [(61, 64), (61, 128), (5, 16)])
def test_vocabulary_padding_is_zero_and_goes_away(vocab: int, padded: int) -> None:
    rule, dims = rule_of("Qwen3ForCausalLM", Sharding.VOCAB)
    dims = {**dims, "vocab": vocab, "padded_vocab": padded}
    full = {rule.hf[0].name: torch.randn(vocab, 24)}
    shards = [shard_tensor(rule, full, dims, rank, 4) for rank in range(4)]
    whole = torch.cat(shards)
    assert whole.shape[0] == padded
    assert not whole[vocab:].any()
    assert torch.equal(merge_shards(rule, shards, dims)[rule.hf[0].name], full[rule.hf[0].name])


def test_padded_vocab_size_is_the_smallest_that_divides() -> None:
    assert [padded_vocab_size(61, tp) for tp in (1, 2, 4, 8)] == [61, 62, 64, 64]


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"num_key_value_heads": 4, "num_attention_heads": 12}, 6, "num_key_value_heads = 4 is neither"),
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, 2, "num_key_value_heads = 3 is neither"),
        ({"num_key_value_heads": 2, "num_attention_heads": 6}, 4, "num_attention_heads = 6 does not divide"),
        ({"num_key_value_heads": 3}, 1, "not a multiple of num_key_value_heads = 3"),
        ({"intermediate_size": 42}, 4, "intermediate_size = 42 does not divide"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused(changes: dict[str, int], tp: int, message: str) -> None:
    own = model("Qwen3ForCausalLM", **changes)
    rules = list(own.weights())
    with pytest.raises(ValueError, match=message):
        [shard_shape(rule, own.dims, tp) for rule in rules]
