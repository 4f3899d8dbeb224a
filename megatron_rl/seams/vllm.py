"""vLLM: its private parts, above all the packed copies of weights that its CPU build computes with. Written for 0.32.

After loading, vLLM gives every linear layer, the embedding and the output layer a function `cpu_linear(x, weight, bias)`
that holds a copy of the weight in its kernel's layout and ignores `weight`. A linear layer's own weight is emptied; the
embedding and the output layer keep theirs, which then does not prove what it computes with. On a GPU there are no copies.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_rl.seams import check_parameters

if TYPE_CHECKING:
    from vllm import LLM

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class QuantMethod(Protocol):
    def process_weights_after_loading(self, layer: CpuLayer) -> None: ...


class CpuLayer(Protocol):
    """What is used of vLLM's layers with a packed copy; the last of linear layers only."""

    weight: Tensor
    quant_method: QuantMethod
    cpu_linear: Product
    input_size_per_partition: int


_BLOCK = 256  # input columns that are read back at once


def shutdown(llm: LLM) -> None:
    """Ends the engine, for which `LLM` has no function; before the process group is destroyed.

    Without vLLM's two searches for garbage, which on a CPU take a second and look through all that was ever imported.
    """
    search = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        gc.collect = search


class _ReloadNoise(logging.Filter):
    """vLLM warns at every weight sync about rotary embeddings, which have no weights."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "RotaryEmbedding: Failed to load weights" not in record.getMessage()


def quiet_reload_messages() -> None:
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_ReloadNoise())


def parts(model: nn.Module) -> dict[str, Tensor]:
    """Views of what vLLM keeps in one parameter, by Hugging Face name: parts of fused layers, matrices of single experts.

    Not of weights that a CPU has packed: linear layers are emptied there, and experts in the kernel's order. On a GPU
    Triton's kernels for experts (`rollout.engine.gpu_options`) leave them as they came.
    """
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        layer: Any = module
        prefix, _, last = name.rpartition(".")
        sizes = getattr(layer, "output_partition_sizes", None)
        if sizes is not None and len(fused.get(last, ())) == len(sizes) and layer.weight.numel():
            rows = layer.weight.detach().split(list(sizes))
            found |= {f"{prefix}.{part}.weight": shard for part, shard in zip(fused[last], rows, strict=True)}
        if hasattr(layer, "w13_weight") and layer.w13_weight.device.type != "cpu":
            experts = name.partition(".experts")[0] + ".experts"
            held = layer.expert_map_manager.get_local_expert_ids()  # with expert parallelism not all
            for number, gate_up, down in zip(held, layer.w13_weight.detach(), layer.w2_weight.detach(), strict=True):
                each = {"gate_proj": gate_up.chunk(2)[0], "up_proj": gate_up.chunk(2)[1], "down_proj": down}
                found |= {f"{experts}.{number}.{part}.weight": shard for part, shard in each.items()}
    return found


# ---------------------------------------------------------------------------------------- experts of other ranks on a CPU
CPU_EXPERTS = (
    "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale a2_scale "
    "workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
)


def skip_experts_of_other_ranks() -> None:
    """With expert parallelism vLLM's kernels for experts on a CPU get the model's expert numbers and take them for their own:
    they read past their weights. From here on they get this rank's numbers, and weight 0 for an expert of another rank.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply
    if original.__name__ == "apply_local":
        return
    check_parameters(original, CPU_EXPERTS)

    def apply_local(
        self: CPUUnquantizedExperts,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        **others: Any,
    ) -> None:
        if expert_map is not None:
            topk_ids = expert_map[topk_ids.long()].to(topk_ids.dtype)
            topk_weights = topk_weights.masked_fill(topk_ids < 0, 0.0)
            topk_ids = topk_ids.clamp(min=0)
        original(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others)

    CPUUnquantizedExperts.apply = apply_local


# ------------------------------------------------------------------------------------------------------- packed copies
def unpack_experts(model: nn.Module) -> None:
    """Before a reload: has vLLM set up its expert layers again, packing included, which it does only without a kernel."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def products(model: nn.Module) -> dict[str, Product]:
    """`cpu_linear` of every layer that has a copy of its own, by the layer's name in vLLM."""
    found = {name: vars(layer).get("cpu_linear") for name, layer in model.named_modules()}
    return {name: product for name, product in found.items() if product not in (None, functional.linear)}


def _layer(model: nn.Module, name: str) -> CpuLayer:
    layer: Any = model.get_submodule(name)
    return layer


def refresh(model: nn.Module, before: Mapping[str, Product]) -> None:
    """After a reload: packs the weight of every layer again that still computes with its product from `before`.

    Raises:
        RuntimeError: such a layer has no weight to pack, since none came for it.
    """
    now = products(model)
    for name, product in before.items():
        if now.get(name) is not product:
            continue
        layer = _layer(model, name)
        if layer.weight.numel() == 0:
            raise RuntimeError(f"the weight sync brought no weights for the engine's layer {name}")
        layer.quant_method.process_weights_after_loading(layer)


def stale_layers(model: nn.Module) -> list[str]:
    """Layers with a weight of their own that compute with another one, by their names in vLLM."""
    return [name for name in products(model) if not _computes_with_own(_layer(model, name))]


def _computes_with_own(layer: CpuLayer) -> bool:
    """Also true where the layer's own weight is emptied, and so cannot be compared."""
    own = layer.weight
    if own.numel() == 0:
        return True
    blocks = zip(_columns(layer, own.shape[1]), own.split(_BLOCK, dim=1), strict=True)
    return all(torch.equal(packed, columns) for packed, columns in blocks)


def weights(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """What reads the weight of a linear layer back from its packed copy, by Hugging Face name.

    A function returns this rank's shard, [rows, columns]. Layers that vLLM has fused (query, key and value; gate and up) are
    cut into their parts.
    """
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, Callable[[], Tensor]] = {}
    for name in products(model):
        layer = _layer(model, name)
        sizes = getattr(layer, "output_partition_sizes", None)  # rows of each part on this rank; linear layers only
        prefix, _, last = name.rpartition(".")
        parts = fused.get(last, [last])
        if sizes is None or layer.weight.numel() or len(parts) != len(sizes):
            continue
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            found[f"{prefix}.{part}.weight"] = _reader(layer, start, size)
            start += size
    return found


def _reader(layer: CpuLayer, start: int, size: int) -> Callable[[], Tensor]:
    return lambda: torch.cat(
        [block[start : start + size] for block in _columns(layer, layer.input_size_per_partition)], 1
    )


def _columns(layer: CpuLayer, count: int) -> Iterator[Tensor]:
    """The `count` columns of the weight that the layer computes with, some at a time: its products with unit vectors."""
    for first in range(0, count, _BLOCK):
        size = min(_BLOCK, count - first)
        unit = torch.zeros(size, count, dtype=layer.weight.dtype)
        unit[torch.arange(size), first + torch.arange(size)] = 1
        yield layer.cpu_linear(unit, layer.weight, None).T
