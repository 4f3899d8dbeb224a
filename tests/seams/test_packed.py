"""Packed copies of weights: which layers are packed again after a reload, and what can be read back from a copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_rl.seams import vllm as packed


class Method:
    """Packs as vLLM's unquantised methods do on a CPU: the product holds a copy, and a linear layer's weight is emptied."""

    def __init__(self, keeps_weight: bool) -> None:
        self.keeps_weight = keeps_weight

    def process_weights_after_loading(self, layer: Any) -> None:
        copy = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, copy, bias)
        if not self.keeps_weight:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def layer(weight: Tensor, keeps_weight: bool, parts: tuple[int, ...] = ()) -> Any:
    made: Any = nn.Module()
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.quant_method = Method(keeps_weight)
    made.quant_method.process_weights_after_loading(made)
    if parts:
        made.input_size_per_partition, made.output_partition_sizes = weight.shape[1], list(parts)
    return made


@pytest.fixture
def model() -> Any:
    """A tied model: embedding and output layer share their weight."""
    torch.manual_seed(0)
    made: Any = nn.Module()
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    made.embed_tokens = layer(torch.randn(12, 300), keeps_weight=True)
    made.attn = nn.Module()
    made.attn.qkv_proj = layer(torch.randn(8, 300), keeps_weight=False, parts=(4, 2, 2))
    made.attn.o_proj = layer(torch.randn(5, 4), keeps_weight=False, parts=(5,))
    made.missing = nn.Module()
    made.missing.cpu_linear = nn.functional.linear  # vLLM's, of a layer that another stage holds
    made.lm_head = layer(torch.randn(12, 300), keeps_weight=True)
    made.lm_head.weight = made.embed_tokens.weight
    made.lm_head.quant_method.process_weights_after_loading(made.lm_head)
    return made


def reload(model: Any, *layers: Any, value: float = 1.0) -> None:
    """What vLLM's reload does to layers whose weights come under their own names."""
    for each in layers:
        if each.weight.numel():
            each.weight.data.fill_(value)
            each.quant_method.process_weights_after_loading(each)
        else:
            each.weight = nn.Parameter(torch.full((sum(each.output_partition_sizes), 4), value))
            each.quant_method.process_weights_after_loading(each)


def test_a_tied_output_layer_is_packed_again(model: Any) -> None:
    before = packed.products(model)
    assert set(before) == {"embed_tokens", "attn.qkv_proj", "attn.o_proj", "lm_head"}
    reload(model, model.embed_tokens, model.attn.qkv_proj, model.attn.o_proj)
    assert packed.stale_layers(model) == ["lm_head"]
    refreshed = packed.products(model)
    packed.refresh(model, before)
    assert packed.stale_layers(model) == []
    after = packed.products(model)
    assert [name for name in after if after[name] is not refreshed[name]] == ["lm_head"], "once each"


def test_a_layer_without_new_weights_is_refused(model: Any) -> None:
    before = packed.products(model)
    reload(model, model.embed_tokens, model.attn.qkv_proj)
    with pytest.raises(RuntimeError, match=r"no weights for the engine's layer attn\.o_proj"):
        packed.refresh(model, before)


def test_weights_are_read_back_by_hugging_face_name(model: Any) -> None:
    torch.manual_seed(0)
    _, fused, single = torch.randn(12, 300), torch.randn(8, 300), torch.randn(5, 4)
    weights = {name: read() for name, read in packed.weights(model).items()}
    parts = dict(
        zip(("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"), fused.split([4, 2, 2]), strict=True)
    )
    assert weights.keys() == {*parts, "attn.o_proj.weight"}
    for name, weight in (parts | {"attn.o_proj.weight": single}).items():
        assert torch.equal(weights[name], weight), name


def test_parts_of_fused_layers_and_experts_have_hugging_faces_names() -> None:
    """As on a GPU, where nothing is packed; `meta` stands for its memory."""
    model: Any = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.attn = nn.Module()
    model.attn.qkv_proj = layer(torch.arange(16.0).view(8, 2), keeps_weight=True, parts=(4, 2, 2))
    model.mlp = nn.Module()
    model.mlp.experts = nn.Module()
    model.mlp.experts.routed_experts = kept = nn.Module()
    kept.expert_map_manager = SimpleNamespace(get_local_expert_ids=lambda: [3, 4, 5])  # the second of two ranks
    kept.activation = SimpleNamespace(value="silu")
    kept.w13_weight = nn.Parameter(torch.empty(3, 10, 4, device="meta"))
    kept.w2_weight = nn.Parameter(torch.empty(3, 4, 5, device="meta"))
    found = packed.parts(model)
    rows = {name: found.pop(f"attn.{name}.weight")[:, 0].tolist() for name in ("q_proj", "k_proj", "v_proj")}
    assert rows == {"q_proj": [0, 2, 4, 6], "k_proj": [8, 10], "v_proj": [12, 14]}
    places = {name: (tuple(view.shape), view.storage_offset()) for name, view in found.items()}
    assert len(places) == 9
    kept.activation = SimpleNamespace(value="swigluoai")  # rows of gate and up projection in turn
    in_turn = packed.parts(model)["mlp.experts.4.up_proj.weight"]
    assert (tuple(in_turn.shape), in_turn.storage_offset(), in_turn.stride()) == ((5, 4), 44, (8, 1))
    assert places["mlp.experts.4.gate_proj.weight"] == ((5, 4), 40)
    assert places["mlp.experts.4.up_proj.weight"] == ((5, 4), 60)
    assert places["mlp.experts.5.down_proj.weight"] == ((4, 5), 40)


def test_shards_are_counted(model: Any) -> None:
    """Layers without a method of vLLM's take them in place; padding is zero."""
    model.norm = nn.Module()
    model.norm.weight = nn.Parameter(torch.full((4, 2), float("nan")), requires_grad=False)
    loader = packed.ShardLoader(model, {"norm.weight": 6})
    loader.tensor("norm.weight")[:2] = 1
    loader.count("norm.weight", 4)
    with pytest.raises(RuntimeError, match=r"4 of 6 elements came for the engine's norm.weight"):
        loader.finish()
    loader.tensor("norm.weight")[2] = 2
    loader.count("norm.weight", 2)
    loader.finish()
    assert model.norm.weight.tolist() == [[1, 1], [1, 1], [2, 2], [0, 0]]
    with pytest.raises(RuntimeError, match=r"8 elements came for the engine's norm.weight, of 6: some came twice"):
        loader.count("norm.weight", 2)
