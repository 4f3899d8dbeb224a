"""A distributed checkpoint of Megatron-Core read as a Hugging Face model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.checkpoint.convert.global_tensors import Memory, TorchDist
from megatron_rl.checkpoint.convert.layout import aliases, global_name, known_names, leading, section_names
from megatron_rl.models.family import Family, Model
from megatron_rl.models.rules import Rule, Sharding, shard_shape, shard_slices
from megatron_rl.weights.files import DTYPE_NAMES, DTYPES, Bits, WeightSource, as_tensor

if TYPE_CHECKING:
    from torch import Tensor

# What training writes beside the model; the fp32 weights of the distributed and of the plain optimizer.
MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
_OTHERS = ("optimizer.", "chained_", "opt_param_scheduler", "rng_state", "rerun_state_machine")


class MegatronModel(WeightSource):
    """A distributed checkpoint seen as a Hugging Face model: the `WeightSource` of conversion, start-up and verification.

    Takes the names of either layer spec, with or without a wrapper's prefix, layers stacked or one by one.

    Args:
        master: read the optimizer's fp32 master weights instead of the model's own.
        any_padding: rows beyond the vocabulary may hold anything. Otherwise they must be zero, so that a config with too
            small a `vocab_size` cannot cut off tokens.

    Raises:
        ValueError: a tensor is missing, unexpected, or not of the shape that config.json gives it; the fields are named.
    """

    def __init__(self, folder: str | Path, model: Model, any_padding: bool = False, master: bool = False) -> None:
        self.folder = Path(folder)
        self._checkpoint, self._model, self._dims = TorchDist(folder), model, model.dims
        self._prefix = self._find_masters() if master else self._find_prefix(model.family)
        # The optimizer has no buffers.
        self._of_buffers = (
            self._find_prefix(model.family) if any(rule.buffer for rule in model.parameters) else self._prefix
        )
        self._place: dict[str, tuple[Rule, int, _Place]] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        used: set[str] = set()
        problems = []
        for rule, layer, expert in model.numbered():
            stored_at = self._locate(rule, layer, expert)
            if stored_at is None:
                problems.append(f"lacks {next(iter(known_names(rule)))} for {rule.hf[0].name}")
                continue
            apart = None if model.is_uniform else layer
            same = {self._prefix + name for name in (global_name(rule, apart), *aliases(rule, apart))}
            used.update(stored_at.names, same if same & set(stored_at.names) else ())
            dtype = DTYPE_NAMES[self._checkpoint.tensors[stored_at.names[0]].dtype]
            for index, tensor in enumerate(rule.hf):
                self._place[tensor.name] = (rule, index, stored_at)
                self.tensors[tensor.name] = (tensor.sizes(model.dims), dtype)
        unexpected = sorted(
            name
            for name in self._checkpoint.tensors.keys() - used
            if not self._is_other(name) and (not master or name.startswith(self._prefix))
        )
        problems += [f"holds unexpected {name}" for name in unexpected]
        if problems:
            more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
            raise ValueError(
                f"{self.folder} does not fit config.json ({model.family.name}, num_hidden_layers = {model.dims['layers']}, "
                f"{model.said_experts}, tie_word_embeddings = {model.description.tied}): it "
                + "; it ".join(problems[:4])
                + more
            )
        if not any_padding:
            self._check_padding()

    def file_of(self, name: str) -> Path:
        place = self._place[name][2]
        chunks = self._checkpoint.overlapping(place.names[0], place.lead)
        return self.folder / chunks[0].file if chunks else self.folder

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = list(self.shape(name))
        shape[dim] = min(stop, shape[dim]) - start
        out = np.empty(shape, DTYPES[self.dtype(name)].bits)
        self.read_into(out, name, dim, start)
        return as_tensor(out, self.dtype(name))

    def read_into(self, out: Bits, name: str, dim: int = 0, start: int = 0) -> None:
        """Fills `out`, contiguous, with entries of a Hugging Face tensor from `start` along `dim` on."""
        rule, index, stored_at = self._place[name]
        low = [start if axis == dim else 0 for axis in range(out.ndim)]
        axis, at, stop = rule.dim, 0, low[rule.dim] + out.shape[rule.dim]
        for piece in shard_slices(rule, self._dims, 0, 1):
            first, at = at, at + piece.length
            a, b = max(piece.start, low[axis]), min(piece.stop, stop)
            if piece.tensor == index and a < b:
                begin = low.copy()
                begin[axis] = first + a - piece.start
                part = out[(slice(None),) * axis + (slice(a - low[axis], b - low[axis]),)]
                self._read_box(rule, stored_at, begin, part)

    def parts(self, name: str, memory: Memory) -> Iterator[Bits]:
        """A whole Hugging Face tensor in its order, some values at a time where the chunks allow it; they hold until the next
        are asked for."""
        rule, index, stored_at = self._place[name]
        shape, begin = self.shape(name), [0] * len(self.shape(name))
        if len(stored_at.names) == 1 and rule.sharding is not Sharding.QKV:
            before = [piece.length for piece in shard_slices(rule, self._dims, 0, 1) if piece.tensor < index]
            begin[rule.dim] = sum(before)
            left = math.prod(shape)
            for chunk in (chunks := self._checkpoint.rows(stored_at.names[0], stored_at.lead, begin, shape)):
                for values in self._checkpoint.stored(stored_at.names[0], chunk):
                    yield values[:left]
                    left -= min(left, values.size)
            if chunks:
                return
        out = memory.array(shape, DTYPES[self.dtype(name)].bits)
        self.read_into(out, name)
        yield out

    def _read_box(self, rule: Rule, place: _Place, begin: list[int], out: Bits) -> None:
        which = 0
        if len(place.names) > 1:  # gate and up, or sections, are tensors of their own
            for rows in self._rows_apart(rule):
                if begin[0] < rows:
                    break
                which, begin[0] = which + 1, begin[0] - rows
        self._checkpoint.read(place.names[which], place.lead, begin, out)

    # ------------------------------------------------------------------------------------------------ finding tensors
    def _find_prefix(self, family: Family) -> str:
        anchor = family.embedding.megatron[0]
        prefixes = sorted(
            name.removesuffix(anchor)
            for name in self._checkpoint.tensors
            if name.endswith(anchor) and not name.startswith(_OTHERS)
        )
        if not prefixes:
            raise ValueError(
                f"{self.folder} holds no {anchor}: it is not the checkpoint of a GPT model of Megatron-Core"
            )
        return min(prefixes, key=len)

    def _find_masters(self) -> str:
        for prefix in MASTERS:
            if any(name.startswith(prefix) for name in self._checkpoint.tensors):
                return prefix
        names = " or ".join(f"{prefix}..." for prefix in MASTERS)
        raise ValueError(f"{self.folder} holds no fp32 master weights ({names}): leave out --master-weights")

    def _is_other(self, name: str) -> bool:
        if self._prefix in MASTERS:
            return False
        return any(n.startswith(_OTHERS) for n in (name, name.removeprefix(self._prefix))) or name.endswith(
            "._extra_state"
        )

    def _locate(self, rule: Rule, layer: int | None, expert: int | None) -> _Place | None:
        for pattern in known_names(rule):
            name = (self._of_buffers if rule.buffer else self._prefix) + pattern.format(layer=layer, expert=expert)
            if name not in self._checkpoint.tensors:
                continue
            lead = tuple(
                number
                for number, symbol in ((layer, "{layer}"), (expert, "{expert}"))
                if number is not None and symbol not in pattern
            )
            names: tuple[str, ...] = (name,)
            if name.endswith("_w"):
                names = (name, name.removesuffix("_w") + "_v")
            elif rule.sections and name.endswith(first := "." + rule.sections[0][0]):
                names = section_names(rule, name.removesuffix(first))
            for number, part in enumerate(names):
                if part not in self._checkpoint.tensors:
                    raise ValueError(f"{self.folder} lacks {part}, which belongs to {name}")
                self._check_shape(part, rule, lead, number if len(names) > 1 else None)
            return _Place(names, lead)
        return None

    def _rows_apart(self, rule: Rule) -> list[int]:
        """Rows of each part of a parameter that is stored in parts."""
        if rule.sections:
            return [self._dims[symbol] for _, symbol in rule.sections]
        return [shard_shape(rule, self._dims, 1)[0] // 2] * 2

    def _check_shape(self, name: str, rule: Rule, lead: tuple[int, ...], part: int | None) -> None:
        dims, shape = self._dims, self._checkpoint.tensors[name].shape
        expected = list(shard_shape(rule, {**dims, "padded_vocab": dims["vocab"]}, 1))
        if part is not None:
            expected[0] = self._rows_apart(rule)[part]
        stacked = leading(rule, self._model)
        before = stacked[len(stacked) - len(lead) :]
        symbols = [f"num_hidden_layers = {dims['layers']}", self._model.said_experts][: len(before)]
        if rule.per_expert and len(lead) == 1:
            before, symbols = (self._model.expert_count,), [self._model.said_experts]
        expected_shape = (*before, *expected)
        fits = len(shape) == len(expected_shape) and all(
            a == b or (rule.sharding is Sharding.VOCAB and axis == len(before) and a > b)
            for axis, (a, b) in enumerate(zip(shape, expected_shape, strict=True))
        )
        if fits:
            return
        fields = []
        for axis, (a, b) in enumerate(itertools.zip_longest(shape, expected_shape)):
            if a == b:
                continue
            if axis < len(before):
                fields.append(symbols[axis])
            elif axis < len(expected_shape):
                fields += [self._model.said(s) for s in dict.fromkeys(t.shape[axis - len(before)] for t in rule.hf)]
        raise ValueError(
            f"{self.folder}: tensor {name} has shape {shape}, but config.json makes it {expected_shape} ({', '.join(fields)})"
        )

    def _check_padding(self) -> None:
        vocab = self._dims["vocab"]
        for rule, _, stored_at in list(self._place.values()):
            if rule.sharding is Sharding.VOCAB:
                rows, columns = self._checkpoint.tensors[stored_at.names[0]].shape
                for row in range(vocab, rows, 4096):
                    end = min(rows, row + 4096)
                    values = np.empty((end - row, columns), self._checkpoint.bits(stored_at.names[0]))
                    self._checkpoint.read(stored_at.names[0], (), (row, 0), values)
                    if (values << 1).any():  # -0 is zero too
                        raise ValueError(
                            f"{self.folder}: tensor {stored_at.names[0]} has {rows} rows, of which those from "
                            f"vocab_size = {vocab} of config.json on are not zero, as padding is here. If config.json is "
                            "the right one, and they are another framework's padding, say --any-padding"
                        )
                self._checkpoint.forget()


@dataclass(frozen=True)
class _Place:
    names: tuple[str, ...]  # one global tensor; gate and up where these are apart; those of sections
    lead: tuple[int, ...]
