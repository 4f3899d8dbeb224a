"""Rollouts in FP8: vLLM's own modules hold the values and scales that the actor's weights quantise to."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import tiny
from models.cut_by_hand import Weights
from torch import Tensor, nn

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models import Model, model_of, read_hf_config
from megatron_rl.models import fp8_weights as fp8
from megatron_rl.rollout import environment
from megatron_rl.rollout.vllm_engine import gpu_options
from megatron_rl.seams.vllm import ShardLoader
from tests.ranks import start

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
SKIP = ["model.layers.1.*"]
LAYOUTS = [
    ("qwen3", 2, False),
    ("qwen3_moe", 2, False),
    ("qwen3_moe", 2, True),
    ("qwen3", 1, False),
    ("qwen3_moe", 1, False),
]


def vllm_model(folder: Path, tensor: int, spread: bool, kernels: pytest.MonkeyPatch) -> nn.Module:
    """vLLM's model on this rank, as on a GPU but for the kernels, which a CPU lacks: they are asked for and not run."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8 as theirs
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model

    nothing = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    kernels.setattr(theirs, "init_fp8_linear_kernel", lambda **asked: nothing)
    kernels.setattr(theirs.Fp8MoEMethod, "_init_moe_kernel", lambda method, layer: None)
    kernels.setattr(theirs, "select_fp8_moe_backend", lambda **asked: (Fp8MoeBackend.TRITON, TritonExperts))
    config = RolloutConfig(fp8="blockwise", fp8_skip=SKIP, tensor_parallel=tensor, expert_parallel=spread)
    options = gpu_options(config, model_of(read_hf_config(folder)))
    settings = EngineArgs(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=True,
        tensor_parallel_size=tensor,
        enable_expert_parallel=spread,
        distributed_executor_backend="external_launcher",
        hf_overrides=options["hf_overrides"],
    ).create_engine_config()
    with set_current_vllm_config(settings):
        if parallel_state._WORLD is None:
            parallel_state.init_distributed_environment(2, dist.get_rank(), "env://", dist.get_rank(), "gloo")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor)
        model = initialize_model(settings)
    record_metadata_for_reloading(model)
    return model


def held(model: nn.Module, name: str, part: int = 0, of: int = 1) -> tuple[Tensor, Tensor]:
    """Values and scales of a part of a linear layer, all parts being of a size but those of attention."""
    layer: Any = model.get_submodule(name)
    sizes = list(layer.output_partition_sizes) if of > 1 else [len(layer.weight)]
    return layer.weight.split(sizes)[part], layer.weight_scale_inv.split([size // 128 for size in sizes])[part]


def shard(whole: tuple[Tensor, Tensor], dim: int, rank: int, tensor: int) -> tuple[Tensor, Tensor]:
    return whole[0].chunk(tensor, dim)[rank], whole[1].chunk(tensor, dim)[rank]


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], name: str) -> None:
    assert found[0].dtype == torch.float8_e4m3fn, name
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8)), name
    assert torch.equal(found[1], wanted[1]), name


def compare(model: nn.Module, weights: dict[str, Tensor], rank: int, tensor: int, spread: bool) -> None:
    reference = {name: fp8.quantise(weight) for name, weight in weights.items() if "_proj" in name}
    layer = "model.layers.0"
    for fused, parts in (("qkv_proj", "qkv"), ("o_proj", "o")):
        for number, part in enumerate(parts):
            name = f"{layer}.self_attn.{part}_proj"
            wanted = shard(reference[f"{name}.weight"], 0 if fused == "qkv_proj" else 1, rank, tensor)
            same(held(model, f"{layer}.self_attn.{fused}", number, len(parts)), wanted, name)
    if not (experts := len([name for name in weights if name.startswith(f"{layer}.mlp.experts") and "up" in name])):
        for fused, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            for number, part in enumerate(parts):
                wanted = shard(reference[f"{layer}.mlp.{part}_proj.weight"], len(parts) % 2, rank, tensor)
                same(held(model, f"{layer}.mlp.{fused}", number, len(parts)), wanted, part)
        return
    [moe] = [
        module for name, module in model.named_modules() if name.startswith(layer) and hasattr(module, "w13_weight")
    ]
    mine: Any = moe
    own = range(rank * experts // tensor, (rank + 1) * experts // tensor) if spread else range(experts)
    cut = (0, 1) if spread else (rank, tensor)
    assert len(mine.w13_weight) == len(own)
    for local, number in enumerate(own):
        wanted = {
            part: reference[f"{layer}.mlp.experts.{number}.{part}_proj.weight"] for part in ("gate", "up", "down")
        }
        for half, part in enumerate(("gate", "up")):
            found = mine.w13_weight[local].chunk(2)[half], mine.w13_weight_scale_inv[local].chunk(2)[half]
            same(found, shard(wanted[part], 0, *cut), f"{number}.{part}")
        found = mine.w2_weight[local], mine.w2_weight_scale_inv[local]
        same(found, shard(wanted["down"], 1, *cut), f"{number}.down")


def load_shards(model: nn.Module, weights: dict[str, Tensor], described: Model, tensor: int, spread: bool) -> None:
    """As a sync in slices does: this rank's parts in bf16, quantised where they are whole."""
    in_fp8 = fp8.vllm_parameters(described, fp8.quantised_modules(described, SKIP))
    whole = Weights(described)
    whole.tensors = {name: weight.view(torch.int16).numpy() for name, weight in weights.items()}
    parts = whole.of_engine(tensor, dist.get_rank() % tensor, spread)
    loader = ShardLoader(model, {name: parts[name].size for name in in_fp8}, in_fp8, torch.bfloat16)
    for name in sorted(in_fp8):
        parameter = model.get_parameter(name)
        for each in (parameter, model.get_parameter(name + fp8.SCALE)):
            each.data.zero_()
        loader.tensor(name).copy_(torch.from_numpy(parts[name]).view(torch.bfloat16))
        loader.count(name, parts[name].size)
    loader.finish()


def load_everywhere(rank: int, folder: str) -> None:
    from safetensors.torch import load_file

    environment.prepare()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it builds
    os.environ["VLLM_DIST_IDENT"] = str(rank)  # ranks that do not share it make no shared memory
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as kernels:
        for variant, tensor, spread in LAYOUTS:
            source = Path(folder) / variant
            weights = load_file(source / "model.safetensors")
            model = vllm_model(source, tensor, spread, kernels)
            modules = fp8.quantised_modules(model_of(read_hf_config(source)), SKIP)
            model.load_weights(fp8.stored(weights.items(), modules, rounded=False))
            compare(model, weights, rank % tensor, tensor, spread)
            load_shards(model, weights, model_of(read_hf_config(source)), tensor, spread)
            compare(model, weights, rank % tensor, tensor, spread)
            kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.bfloat16}
            assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.qkv_proj.weight"} <= kept
            assert ("model.layers.0.mlp.gate.weight" in kept) == (variant == "qwen3_moe")
            assert any(name.startswith("model.layers.1.mlp") and "norm" not in name for name in kept)
            assert not any(name.startswith("model.layers.0") and "proj" in name for name in kept)


@pytest.mark.engine
def test_vllms_modules_hold_what_the_weights_quantise_to(tmp_path: Path) -> None:
    tiny.write(tmp_path / "qwen3", "qwen3", **SIZES)
    tiny.write(tmp_path / "qwen3_moe", "qwen3_moe", **SIZES, **EXPERTS)
    start(load_everywhere, 2, str(tmp_path))
