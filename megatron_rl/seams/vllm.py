"""vLLM: its private parts, above all the packed copies of weights that its CPU build computes with. Written for 0.32.

After loading, vLLM gives every linear layer, the embedding and the output layer a function `cpu_linear(x, weight, bias)`
that holds a copy of the weight in its kernel's layout and ignores `weight`. A linear layer's own weight is emptied; the
embedding and the output layer keep theirs, which then does not prove what it computes with. On a GPU there are no copies.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_rl.base import block_fp8

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm import LLM

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class QuantMethod(Protocol):
    def process_weights_after_loading(self, layer: CpuLayer) -> None: ...


class CpuLayer(Protocol):
    """The part in use of vLLM's layers with a packed copy; the last of linear layers only."""

    weight: Tensor
    quant_method: QuantMethod
    cpu_linear: Product
    input_size: int


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


def unquantised(config: PretrainedConfig, changes: Mapping[str, object]) -> PretrainedConfig:
    """Makes for `hf_overrides` the configuration of a folder whose weights are not quantised, and so changed. A value of null
    would not do: GPT-OSS's loader looks into an entry that is there."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.update(changes)
    return config


class _ReloadNoise(logging.Filter):
    """vLLM warns at every weight sync about rotary embeddings, which have no weights."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "RotaryEmbedding: Failed to load weights" not in record.getMessage()


def quiet_reload_messages() -> None:
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_ReloadNoise())


# -------------------------------------------------------------------------------------------------------------- sinks
_SINKS = ".self_attn.sinks"


def without_sinks(weights: Iterable[tuple[str, Tensor]], sinks: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights but for attention's sinks, which are put into `sinks`: GPT-OSS's loader copies them into what a reload has
    in the parameters' place, and past its counting, so that they never arrive."""
    for name, values in weights:
        if name.endswith(_SINKS):
            sinks[name] = values.clone()
        else:
            yield name, values


def load_sinks(model: nn.Module, sinks: Mapping[str, Tensor]) -> None:
    """Loads this rank's part of each, after a reload."""
    from vllm.distributed import get_tensor_model_parallel_rank

    for name, values in sinks.items():
        parameter = model.get_parameter(name.replace(_SINKS, ".attn.sinks"))
        heads = parameter.shape[0]
        parameter.data.copy_(values.narrow(0, get_tensor_model_parallel_rank() * heads, heads))


def parts(model: nn.Module) -> dict[str, Tensor]:
    """Views of what vLLM keeps in one parameter, by Hugging Face name: parts of fused layers, matrices of single experts.

    Not of weights that a CPU has packed: linear layers are emptied there, and experts in the kernel's order. On a GPU
    Triton's kernels for experts (`rollout.engine.gpu_options`) leave them as they came.
    """
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    shards: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        layer: Any = module
        prefix, _, last = name.rpartition(".")
        sizes = getattr(layer, "output_partition_sizes", None)
        if sizes is not None and len(fused.get(last, ())) == len(sizes) and layer.weight.numel():
            rows = layer.weight.detach().split(list(sizes))
            shards |= {f"{prefix}.{part}.weight": shard for part, shard in zip(fused[last], rows, strict=True)}
        if hasattr(layer, "w13_weight") and layer.w13_weight.device.type != "cpu":
            experts = name.partition(".experts")[0] + ".experts"
            held = layer.expert_map_manager.get_local_expert_ids()  # with expert parallelism not all
            in_turn = layer.activation.value == "swigluoai"  # rows of gate and up projection
            for number, gate_up, down in zip(held, layer.w13_weight.detach(), layer.w2_weight.detach(), strict=True):
                gate, up = (gate_up[::2], gate_up[1::2]) if in_turn else gate_up.chunk(2)
                each = {"gate_proj": gate, "up_proj": up, "down_proj": down}
                shards |= {f"{experts}.{number}.{part}.weight": shard for part, shard in each.items()}
    return shards


# ---------------------------------------------------------------------------------------------------- ready-made shards
class ShardLoader:
    """Takes the shards of a model's parameters as vLLM loads them, and hands each module that has all of its own to vLLM's
    processing: its reload of one layer, with the writing left to the caller. Modules that get nothing stay as they are.

    Args:
        wanted: elements that will be written, by parameter name; padding counts as none and is zero.
        in_fp8: parameters that are quantised when their module has all of its own; they come in `dtype`. Layers that were not
            made for FP8 get the numbers that values and scales stand for.
    """

    def __init__(
        self,
        model: nn.Module,
        expected_elements: Mapping[str, int],
        in_fp8: Collection[str] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model, self._wanted, self._in_fp8, self._dtype = model, expected_elements, in_fp8, dtype
        self._written = dict.fromkeys(expected_elements, 0)
        self._open: dict[str, dict[str, Tensor]] = {}  # module -> the tensors that its parameters are loaded into
        self._missing: dict[str, int] = defaultdict(int)  # module -> elements that have not come
        for name, elements in expected_elements.items():
            self._missing[name.rpartition(".")[0]] += elements

    def tensor(self, name: str) -> Tensor:
        """Where a parameter's shard goes, in the layout in which vLLM loads it."""
        module, _, own = name.rpartition(".")
        if module not in self._open:
            self._open[module] = self._prepare(module)
        return self._open[module][own]

    def count(self, name: str, elements: int) -> None:
        """Counts elements as written; the last of a module has it processed.

        Raises:
            RuntimeError: more came than the parameter has.
        """
        self._written[name] += elements
        if self._written[name] > self._wanted[name]:
            raise RuntimeError(
                f"{self._written[name]} elements came for the engine's {name}, of {self._wanted[name]}: some came twice"
            )
        module = name.rpartition(".")[0]
        self._missing[module] -= elements
        if not self._missing[module]:
            self._process(module)

    def finish(self) -> None:
        """Raises:
        RuntimeError: a parameter did not get all of its elements.
        """
        for name, elements in self._wanted.items():
            if self._written[name] != elements:
                raise RuntimeError(f"{self._written[name]} of {elements} elements came for the engine's {name}")

    def _prepare(self, name: str) -> dict[str, Tensor]:
        from vllm.model_executor.model_loader.reload import layerwise, meta, utils

        layer = self._model.get_submodule(name)
        info = layerwise.get_layerwise_info(layer)
        if not _loads_in_place(layer, info.restore_metadata[0]):
            info.kernel_tensors = utils.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            meta.restore_layer_on_meta(layer, info)
            meta.materialize_layer(layer, info)
        tensors: dict[str, Tensor] = {}
        for parameter_name, parameter in layer.named_parameters(recurse=False):
            if parameter_name.endswith(block_fp8.SCALE) or f"{name}.{parameter_name}" not in self._wanted:
                continue  # made with the values; or another module's, which is loaded there: biases of experts
            tensors[parameter_name] = parameter.data
            if f"{name}.{parameter_name}" in self._in_fp8:
                tensors[parameter_name] = torch.empty_like(parameter.data, dtype=self._dtype)
            if self._wanted[f"{name}.{parameter_name}"] < parameter.numel():
                tensors[parameter_name].zero_()
        return tensors

    def _process(self, name: str) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        layer = self._model.get_submodule(name)
        for own, tensor in self._open.pop(name).items():
            if f"{name}.{own}" in self._in_fp8:
                _store_in_fp8(layer, own, tensor)
        if layerwise.get_layerwise_info(layer).kernel_tensors is not None:
            layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))


def _store_in_fp8(layer: nn.Module, own: str, weight: Tensor) -> None:
    values, scales = block_fp8.quantise(weight)
    parameter = layer.get_parameter(own)
    if parameter.dtype == values.dtype:
        parameter.data.copy_(values)
        layer.get_parameter(own + block_fp8.SCALE).data.copy_(scales)
    else:
        parameter.data.copy_(block_fp8.dequantise(values, scales))


def loaded_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes in which vLLM loads a model's parameters, without scales of FP8; a tied output layer has none of its own."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.model_loader.reload import layerwise

    shapes = {}
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        if isinstance(model.get_submodule(module), MLAAttention):
            continue  # derived, see `derive_latents`
        as_loaded = layerwise.get_layerwise_info(model.get_submodule(module)).restore_metadata[0]
        if not own.endswith(block_fp8.SCALE):
            shapes[name] = tuple(as_loaded.get(own, parameter).shape)
    return shapes


def _loads_in_place(layer: nn.Module, loaded: Mapping[str, Tensor]) -> bool:
    """Whether what the layer computes with is what is loaded, so that vLLM has nothing to process: no layer with a packed
    copy on a CPU, none that is quantised, no kernels for experts but Triton's. `loaded`: parameters as they are loaded."""
    method: Any = getattr(layer, "quant_method", None)
    if method is not None:
        backend = getattr(method, "unquantized_backend", None)  # of experts
        if type(method).__name__ not in _UNQUANTIZED or (backend is not None and backend.name != "TRITON"):
            return False
        if any(parameter.device.type == "cpu" for parameter in layer.parameters(recurse=False)):
            return False
    own = dict(layer.named_parameters(recurse=False))
    return all(
        name in own and (own[name].shape, own[name].stride(), own[name].dtype) == (t.shape, t.stride(), t.dtype)
        for name, t in loaded.items()
    )


_UNQUANTIZED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


@contextlib.contextmanager
def loading_shards(llm: LLM, elements: Mapping[str, int], in_fp8: Collection[str]) -> Iterator[ShardLoader]:
    """While entered, this rank's engine takes shards; at the end all of it has to be there. Arguments: see `ShardLoader`.

    Raises:
        RuntimeError: see `ShardLoader`.
    """
    from vllm.config import set_current_vllm_config

    [worker] = llm.collective_rpc(lambda worker: worker)
    model: nn.Module = worker.model_runner.get_model()
    before = products(model)
    if before:
        unpack_experts(model)
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        loader = ShardLoader(model, elements, in_fp8, worker.vllm_config.model_config.dtype)
        yield loader
        loader.finish()
        refresh(model, before)
        derive_latents(model, worker.vllm_config.model_config.dtype)


def derive_latents(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes vLLM's latent attention derive anew, after a reload, what it keeps of a projection's weight."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    for layer in model.modules():
        if isinstance(layer, MLAAttention):
            layer.process_weights_after_loading(dtype)


# ------------------------------------------------------------------------------------------------------- packed copies
def unpack_experts(model: nn.Module) -> None:
    """Makes vLLM set up its expert layers again before a reload, packing included, which it does only without a kernel."""
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
    """Packs, after a reload, the weight of every layer again that still computes with its product from `before`.

    Raises:
        RuntimeError: such a layer has no weight to pack, since none came for it.
    """
    for name, product in before.items():
        layer = _layer(model, name)
        if vars(layer).get("cpu_linear") is not product:
            continue
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
    """Functions that read the weight of a linear layer back from its packed copy, by Hugging Face name.

    A function returns this rank's shard, [rows, columns]. Layers that vLLM has fused (query, key and value; gate and up) are
    cut into their parts.
    """
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    readers: dict[str, Callable[[], Tensor]] = {}
    for name in products(model):
        layer = _layer(model, name)
        sizes = getattr(layer, "output_partition_sizes", None)  # rows of each part on this rank; linear layers only
        prefix, _, last = name.rpartition(".")
        parts = fused.get(last, [last])
        if sizes is None or layer.weight.numel() or len(parts) != len(sizes):
            continue
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            readers[f"{prefix}.{part}.weight"] = _reader(layer, start, size)
            start += size
    return readers


def _reader(layer: CpuLayer, start: int, size: int) -> Callable[[], Tensor]:
    columns = getattr(layer, "input_size_per_partition", 0) or layer.input_size  # a router is not cut
    return lambda: torch.cat([block[start : start + size] for block in _columns(layer, columns)], 1)


def _columns(layer: CpuLayer, count: int) -> Iterator[Tensor]:
    """The `count` columns of the weight that the layer computes with, some at a time: its products with unit vectors."""
    for first in range(0, count, _BLOCK):
        size = min(_BLOCK, count - first)
        unit = torch.zeros(size, count, dtype=layer.weight.dtype)
        unit[torch.arange(size), first + torch.arange(size)] = 1
        yield layer.cpu_linear(unit, layer.weight, None).T
