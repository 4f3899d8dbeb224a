"""LoRA's adapters in Megatron-Core's modules: what they compute, how they begin, and their place in a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_rl.models.family import Model
from megatron_rl.models.hf_config import HFConfig
from megatron_rl.models.lora import MODULE, adapters_of, module_of, pair, parameter_names, targets_of
from megatron_rl.models.rules import Rule, Sharding, Slice, shard_slices
from megatron_rl.weights.files import MadeWeights, SafetensorsFolder
from megatron_rl.weights.inventory import LocalWeight, local_weights, split_axis
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import Axis, ParallelGroups

if TYPE_CHECKING:
    from megatron_rl.config.actor import LoRAConfig
    from megatron_rl.config.schema import Config
    from megatron_rl.seams.megatron import Chunk

ADAPTER = "lora_adapter"  # attribute of a linear layer's weight


@dataclass(frozen=True)
class _Held:
    """One targeted tensor of a linear layer's weight: its parameters' names, and their rules."""

    names: tuple[str, str]
    rules: tuple[Rule, Rule]


class Adapter(nn.Module):
    """The pairs beside one linear layer, as this tensor-parallel rank has them: adds scale · B(A(x)) to its output.

    Where the layer is cut by rows of W, every rank has A whole, and so the same A(x); where by columns, A(x) is summed over
    ranks. In both cases what passes between ranks is `rank` numbers per token. Experts are whole.
    """

    def __init__(
        self, weight: LocalWeight, model: Model, lora: LoRAConfig, parallel: ParallelGroups, sequence: bool
    ) -> None:
        super().__init__()
        rule, base, axis = weight.rule, weight.parameter, split_axis(weight.rule, parallel)
        self.on, self.scale, self.dropout, self._parallel = True, lora.scale, lora.dropout, parallel
        self._dims = model.dims
        self.by_columns, self.per_expert, self.sequence = (
            rule.sharding is Sharding.ROW,
            rule.per_expert,
            sequence,
        )
        self.duplicated = not rule.is_cut
        targets = targets_of(lora, model)
        self.pieces = _pieces(shard_slices(rule, model.dims, axis.rank, axis.size), bool(rule.sections))
        self.held: dict[int, _Held] = {}
        for number, tensor in enumerate(rule.hf):
            if module_of(tensor) not in targets:
                continue
            self.held[number] = _Held(parameter_names(tensor), pair(rule, tensor, model))
            rows = sum(length for piece, _, length in self.pieces if piece == number)
            shapes = (lora.rank, base.shape[1]), (base.shape[0] if self.by_columns else rows, lora.rank)
            for name, made_by, shape in zip(*vars(self.held[number]).values(), shapes, strict=True):
                values = torch.empty(shape, dtype=base.dtype, device=base.device)
                self.register_parameter(name, self._marked(nn.Parameter(values), base, made_by))
        self._name = next(iter(self.held.values())).rules[0].hf[0].name
        # Where tensor-parallel ranks have the same inputs, they drop the same.
        self._part = parallel.tp.rank if self.by_columns or sequence or self.per_expert else 0
        self.eval()

    def _marked(self, parameter: nn.Parameter, base: Tensor, rule: Rule) -> nn.Parameter:
        """Gives a parameter the attributes by which Megatron-Core sums gradients and their norm."""
        cut = rule.is_cut
        set_tensor_model_parallel_attributes(parameter, cut or self.per_expert, rule.dim, 1)
        marks = cast(Tensor, parameter)
        marks.allreduce = getattr(base, "allreduce", True)  # type: ignore[attr-defined]
        marks.sequence_parallel = self.sequence and not cut and not self.per_expert  # type: ignore[attr-defined]
        return parameter

    def matrices(self, number: int) -> tuple[Tensor, Tensor]:
        inner, outer = self.held[number].names
        return self.get_parameter(inner), self.get_parameter(outer)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs of this rank] to what the layer's output lacks, [..., outputs of this rank]."""
        pairs = {number: self.matrices(number) for number in self.held}
        x, scale = self._dropped(x) if self.training and self.dropout else (x, self.scale)
        low = self._exchanged(scale * F.linear(x, torch.cat([inner for inner, _ in pairs.values()])))
        parts = low.split([len(inner) for inner, _ in pairs.values()], dim=-1)
        outputs = (F.linear(part, outer) for part, (_, outer) in zip(parts, pairs.values(), strict=True))
        return self._laid_out(dict(zip(pairs, outputs, strict=True)), -1)

    def _dropped(self, x: Tensor) -> tuple[Tensor, float]:
        """The inputs without those that are dropped, and the scale that makes up for them; see `dropping`."""
        seed = _seed_of(f"{torch.initial_seed()} {self._name} {self._part}")
        generator = torch.Generator(x.device).manual_seed(seed)
        kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - self.dropout, generator=generator)
        return x * kept, self.scale / (1 - self.dropout)

    def merge(self, weight: Tensor) -> Tensor:
        """W + scale · BA of this rank's slice of W, in W's dtype; summed in fp32. W itself where the adapters are off."""
        if not self.on:
            return weight
        products = {
            number: self.scale * (outer.detach().float() @ inner.detach().float())
            for number, (inner, outer) in ((number, self.matrices(number)) for number in self.held)
        }
        return (weight.float() + self._laid_out(products, 0)).to(weight.dtype)

    def _laid_out(self, weights: dict[int, Tensor], dim: int) -> Tensor:
        """Every tensor's outputs along `dim`, in the order in which Megatron's fused weight has them; 0 without a pair."""
        if self.by_columns:
            return weights[0]
        some = next(iter(weights.values()))
        shape = list(some.shape)

        def piece(tensor: int, start: int, length: int) -> Tensor:
            if tensor in weights:
                return weights[tensor].narrow(dim, start, length)
            shape[dim] = length
            return some.new_zeros(shape)

        return torch.cat([piece(*place) for place in self.pieces], dim=dim)

    def _exchanged(self, low: Tensor) -> Tensor:
        if self.per_expert or self.duplicated or self._parallel.tp.size == 1:
            return low
        if self.by_columns:
            if self.sequence:
                return tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
            return tensor_parallel.reduce_from_tensor_model_parallel_region(low)
        if self.sequence:
            return tensor_parallel.gather_from_sequence_parallel_region(low)
        return tensor_parallel.copy_to_tensor_model_parallel_region(low)

    def sharded(self, prefix: str) -> Iterator[tuple[str, ShardedTensor | ShardedTensorFactory]]:
        """Every parameter under its name in the chunk, for Megatron's distributed checkpoints; stored as PEFT names it."""
        tp, copy = self._parallel.tp, self._parallel.dp.rank
        if self.per_expert:
            copy = parallel_state.get_expert_data_parallel_rank()
        for held in self.held.values():
            for name, rule in zip(held.names, held.rules, strict=True):
                cut = rule.is_cut and not self.per_expert
                place = [(rule.dim, tp.rank, tp.size)] if cut else []
                replica = (0, 0 if cut or self.per_expert else tp.rank, copy)
                key, parameter = rule.hf[0].name, self.get_parameter(name)
                if rule.sections:
                    sizes = [self._dims[symbol] for _, symbol in rule.sections]
                    yield prefix + name, _in_sections(key, parameter, sizes, tp, replica)
                    continue
                yield prefix + name, ShardedTensor.from_rank_offsets(key, parameter, *place, replica_id=replica)


def _pieces(slices: Sequence[Slice], in_sections: bool) -> list[tuple[int, int, int]]:
    """(tensor, where in this rank's rows of its B, length) of the pieces of an output, in their order. B's rows follow one
    another as in files; of sections each is cut, so there are gaps between them in files."""
    first: dict[int, int] = {}
    in_order = []
    for piece in slices:
        at = first.setdefault(piece.tensor, 0 if in_sections else piece.start)
        in_order.append((piece.tensor, at if in_sections else piece.start - at, piece.length))
        if in_sections:
            first[piece.tensor] += piece.length
    return in_order


def _in_sections(
    key: str, parameter: Tensor, sizes: Sequence[int], tp: Axis, replica: tuple[int, int, int]
) -> ShardedTensorFactory:
    """A matrix whose rows are this rank's of every section, which are of `sizes` rows on all ranks together: in equal blocks,
    as Megatron-Core stores what is not one range of rows."""
    block = math.gcd(*sizes) // tp.size
    starts = [sum(sizes[:number]) + tp.rank * size // tp.size for number, size in enumerate(sizes)]
    rows = [start + at for start, size in zip(starts, sizes, strict=True) for at in range(0, size // tp.size, block)]
    count = sum(sizes) // block

    def build(key: str, values: Tensor, replica: tuple[int, int, int], _: slice | None) -> list[ShardedTensor]:
        blocks = zip(rows, values.split(block), strict=True)
        return [
            ShardedTensor.from_rank_offsets(key, part, (0, row // block, count), replica_id=replica)
            for row, part in blocks
        ]

    return ShardedTensorFactory(key, parameter, build, torch.cat, replica)


def add_adapters(
    chunks: Sequence[Chunk], model: Model, hf_config: HFConfig, config: Config, parallel: ParallelGroups
) -> Model | None:
    """Puts the recipe's adapters beside the targeted linear layers, and freezes every other parameter.

    Returns the adapters as a model; None where the recipe has none and every parameter is trained.
    """
    lora = config.actor.lora
    if lora is None:
        return None
    adapters = adapters_of(model, lora)
    _attach(chunks, model, lora, parallel, config.actor.parallel.sequence)
    device = next(chunks[0].parameters()).device
    begin = FreshAdapters(adapters, config.seed, device) if lora.path is None else SafetensorsFolder(lora.path)
    load_hf_weights(chunks, adapters.family, hf_config, begin, parallel)
    if config.actor.recompute != "none" and chunks[0].pre_process:
        # What is computed again takes part in the backward pass only where its input does.
        chunks[0].embedding.register_forward_hook(_begin_gradients)
    return adapters


def _attach(chunks: Sequence[Chunk], model: Model, lora: LoRAConfig, parallel: ParallelGroups, sequence: bool) -> None:
    targets = set(targets_of(lora, model))
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
    for weight in local_weights(chunks, model, parallel):
        rule = weight.rule
        targeted = rule.is_projection and targets.intersection(map(module_of, rule.hf))
        if not targeted or (rule.per_expert and not lora.experts):
            continue
        chunk = next(chunk for chunk in chunks if any(weight.parameter is own for own in chunk.parameters()))
        layer = chunk.get_submodule(weight.name.rpartition(".")[0])
        adapter = Adapter(weight, model, lora, parallel, sequence)
        layer.register_module(MODULE, adapter)
        setattr(weight.parameter, ADAPTER, adapter)
        layer.register_forward_hook(_add)


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> object:
    adapter = cast(Adapter, layer.get_submodule(MODULE))
    if not adapter.on:
        return output
    return output[0] + adapter(_normed(layer, inputs[0])), output[1]


def _normed(layer: nn.Module, x: Tensor) -> Tensor:
    """The matrix's input: of Transformer Engine's layers with a norm fused in, the norm of the input."""
    weight: Tensor | None = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return x
    return F.rms_norm(x, weight.shape, weight + 1 if layer.zero_centered_gamma else weight, cast(float, layer.eps))


def _begin_gradients(embedding: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapters_in(chunk: nn.Module) -> dict[str, Adapter]:
    """The adapters of a chunk by their modules' names."""
    return {name: module for name, module in chunk.named_modules() if isinstance(module, Adapter)}


def merged(parameter: Tensor, values: Tensor) -> Tensor:
    """A parameter's values with what its adapters add; the values themselves where it has none."""
    adapter: Adapter | None = getattr(parameter, ADAPTER, None)
    return values if adapter is None else adapter.merge(values)


@contextlib.contextmanager
def switched_off(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """While entered, the model is the one without adapters."""
    adapters = [adapter for chunk in chunks for adapter in adapters_in(chunk).values()]
    for adapter in adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True


def dropping(chunks: Sequence[nn.Module], updates: bool) -> bool:
    """Whether the passes that follow drop some of the adapters' inputs: those of updates, where there is dropout."""
    adapters = [adapter for chunk in chunks for adapter in adapters_in(chunk).values() if adapter.dropout]
    for adapter in adapters:
        adapter.train(updates)
    return updates and bool(adapters)


def begin_pass(*place: int) -> None:
    """Draws, before a forward pass with dropout, the numbers that tell it from all others of the run.

    They become the seed of the host's random state, from which nothing is drawn: what a layer drops follows from this seed
    and its name. Megatron-Core restores that state where it computes a layer again, so the layer drops the same.
    """
    torch.default_generator.manual_seed(_seed_of(" ".join(map(str, place))))


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def sharded_adapters(chunk: nn.Module) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Tensors of a checkpoint of a chunk with adapters; empty where there are none."""
    return {name: tensor for at, adapter in adapters_in(chunk).items() for name, tensor in adapter.sharded(f"{at}.")}


class FreshAdapters(MadeWeights):
    """The values that adapters begin with, a source of weights: A uniform within ±1/√inputs, as PEFT's, and B zero.

    A tensor's numbers follow from the seed and its name, whatever the layout.
    """

    def __init__(self, adapters: Model, seed: int, where: torch.device) -> None:
        super().__init__(adapters, "F32", Path("(fresh adapters)"))
        self._seed, self._where = seed, where

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = self.shape(name)
        whole = torch.zeros(shape, device=self._where)
        if name.endswith("lora_A.weight") and not whole.is_meta:
            generator = torch.Generator().manual_seed(_seed_of(f"{self._seed} {name}"))
            bound = 1 / math.sqrt(shape[1])
            whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return whole.narrow(dim, start, stop - start)
