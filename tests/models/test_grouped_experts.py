"""DeepSeek-V3's and GLM-4.5's experts: biases by which they are chosen, layers of the files that are not read, refusals."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_rl.actor.build import build_model
from megatron_rl.actor.routing import LayerRouting, Pass, update_biases
from megatron_rl.config.actor import ActorConfig, ParallelConfig
from megatron_rl.models import Model, model_of, read_hf_config
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.inventory import local_weights
from megatron_rl.weights.layouts import ActorLayout, EngineLayout
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups
from megatron_rl.weights.sync_plan import make_plan
from megatron_rl.weights.transfer import Transfer

from . import tiny

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("grouped")
    return {variant: tiny.write(root / variant, variant) for variant in ("deepseek_v3", "glm4_moe")}


def test_layers_that_predict_further_tokens_are_neither_read_nor_exported(
    folders: dict[str, Path], tmp_path: Path, parallel: ParallelGroups
) -> None:
    config = read_hf_config(folders["deepseek_v3"])
    weights = load_file(folders["deepseek_v3"] / "model.safetensors")
    assert config["num_nextn_predict_layers"] == 1
    further = {f"model.layers.{config['num_hidden_layers']}.{name}": torch.zeros(2) for name in ("eh_proj", "enorm")}
    save_file(weights | further, tmp_path / "model.safetensors")
    exported = dict(iter_hf_weights(_loaded(config, tmp_path, parallel, torch.float32), *_named(config), parallel))
    assert exported.keys() == weights.keys()
    save_file(weights | {"model.layers.9.enorm": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds unexpected model\.layers\.9\.enorm"):
        _loaded(config, tmp_path, parallel, torch.float32)


def test_biases_are_float32_in_a_model_of_bf16_and_reach_the_engine_so(
    folders: dict[str, Path], parallel: ParallelGroups
) -> None:
    config = read_hf_config(folders["deepseek_v3"])
    model, source = model_of(config), load_file(folders["deepseek_v3"] / "model.safetensors")
    chunks = _loaded(config, folders["deepseek_v3"], parallel, torch.bfloat16)
    weights = {weight.key: weight.parameter.detach() for weight in local_weights(chunks, model, parallel)}
    layouts = ActorLayout.of(ParallelConfig(), model.dims["layers"], 1), EngineLayout(1)
    plan = make_plan(model, *layouts, bucket_elements=10**4, node=1)
    transfer = Transfer(plan, weights, torch.bfloat16, ALONE, timedelta(seconds=9))
    engine = _Engine(plan.of(0).parameters)
    transfer.push(engine)
    assert engine.came == transfer.wanted
    for name, whole in source.items():
        if name.endswith(BIAS):
            assert not torch.equal(whole, whole.bfloat16().float())
            assert torch.equal(engine.tensors[name], whole)
    both = [source[f"model.layers.1.self_attn.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert torch.equal(engine.tensors["model.layers.1.self_attn.fused_qkv_a_proj.weight"], torch.cat(both).bfloat16())


def test_an_update_moves_a_bias_up_where_too_few_tokens_went(
    folders: dict[str, Path], parallel: ParallelGroups
) -> None:
    model = model_of(read_hf_config(folders["glm4_moe"]))
    router = _Router(model.expert_count)
    routings = [
        LayerRouting(layer + 1, router if layer == 1 else _Router(model.expert_count), False) for layer in (1, 2)
    ]
    for routing in routings:
        routing.given = Pass(None, torch.tensor([True, True, True, False]), updates=True)
    chosen = torch.zeros(4, model.expert_count, dtype=torch.bool)
    chosen[:, 0] = chosen[0, 1] = chosen[3, 2] = True
    with torch.no_grad():  # a pass for log-probs
        router(chosen)
    update_biases(routings, model, 0.01)
    assert not router.expert_bias.any()
    router(chosen)
    update_biases(routings, model, 0.01)
    # Of the 4 counted places, experts 0 and 1 have more than 4 / 16; the token that predicts nothing does not count.
    expected = torch.full((model.expert_count,), 0.01)
    expected[:2] = -0.01
    assert torch.equal(router.expert_bias, expected)
    routings[0].reset()
    update_biases(routings, model, 0.01)
    assert torch.equal(router.expert_bias, expected)


CHANGES: dict[str, dict[str, Any]] = {
    "scoring_func": {"scoring_func": "softmax"},
    "topk_method": {"topk_method": "greedy"},
    "norm_topk_prob": {"norm_topk_prob": False},
    "topk_group": {"num_experts_per_tok": 2},
    "n_group": {"n_group": 3},
    "first_k_dense_replace": {"first_k_dense_replace": 4},
    "num_experts_per_tok": {"num_experts_per_tok": 17},
    "moe_layer_freq": {"moe_layer_freq": 2},
    "n_hash_layers": {"n_hash_layers": 3},
    "rms_norm_eps": {"rms_norm_eps": 1e-5},
    "q_lora_rank": {"q_lora_rank": None},
    "num_key_value_heads": {"num_key_value_heads": 2},
    "rope_interleave": {"rope_interleave": False},
    "attention_bias": {"attention_bias": True},
    "v_head_dim": {"v_head_dim": 64},
    "rope_type": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "mscale_all_dim": {"rope_parameters": {**tiny.YARN, "mscale_all_dim": 1.0}},
    "attention_factor": {"rope_parameters": {**tiny.YARN, "attention_factor": 1.5}},
    "truncate": {"rope_parameters": {**tiny.YARN, "truncate": False}},
    "index_topk": {"index_topk": 2048},
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_that_is_not_honoured_is_refused_by_name(folders: dict[str, Path], field: str) -> None:
    config = read_hf_config(folders["deepseek_v3"])
    model_of(config)
    with pytest.raises(ValueError, match=f"`{field}`"):
        model_of({**config, **CHANGES[field]})


def test_a_file_without_what_vllm_routes_by_is_refused(folders: dict[str, Path]) -> None:
    config = read_hf_config(folders["deepseek_v3"])
    for name in ("topk_method", "scoring_func"):
        with pytest.raises(ValueError, match=f"config.json has no `{name}`.*set it to"):
            model_of({key: value for key, value in config.items() if key != name})


class _Router(nn.Module):
    """A router as far as routing reads one: gives out what it is given as its map."""

    expert_bias: Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(experts))

    def forward(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return chosen.float(), chosen


class _Engine:
    """Tensors of an engine's names and shapes, biases in float32."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        dtypes = {name: torch.float32 if name.endswith(BIAS) else torch.bfloat16 for name in shapes}
        self.tensors = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
        self.came = dict.fromkeys(shapes, 0)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def count(self, name: str, elements: int) -> None:
        self.came[name] += elements


def _named(config: Any) -> tuple[Any, Any]:
    return model_of(config).family, config


def _loaded(config: Any, folder: Path, parallel: ParallelGroups, dtype: torch.dtype) -> list[nn.Module]:
    model: Model = model_of(config)
    with device.megatron(), torch.no_grad():
        chunks = build_model(model, ActorConfig(), dtype)
    load_hf_weights(chunks, model.family, config, folder, parallel)
    return list(chunks)
