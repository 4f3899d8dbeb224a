"""Adapters beside one linear layer, as every rank of a layout makes them; no process group is needed for that."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn

from megatron_rl.config.actor import LoRAConfig
from megatron_rl.models.lora import adapters_of
from megatron_rl.models.rules import Rule, Sharding, shard_shape
from megatron_rl.weights.adapters import Adapter, FreshAdapters, begin_pass
from megatron_rl.weights.inventory import LocalWeight
from megatron_rl.weights.parallel import Axis, ParallelGroups

from .cut_by_hand import model_of

MODEL = model_of("Qwen3ForCausalLM")
RULES = [rule for rule in MODEL.family.rules if rule.is_projection]


def adapter(
    rule: Rule,
    tp: Axis,
    dp: Axis = Axis(),
    dropout: float = 0.5,
    sequence: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    named = rule.at(0, -1)
    weight = nn.Parameter(torch.zeros(shard_shape(rule, MODEL.dims, tp.size), dtype=dtype))
    local = LocalWeight((MODEL.family.rules.index(rule), 0, -1), named, "decoder.layers.0.weight", weight)
    lora = LoRAConfig(rank=2, alpha=4.0, targets=["all-linear"], dropout=dropout)
    return Adapter(local, MODEL, lora, ParallelGroups(tp=tp, dp=dp), sequence)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.hf[0].name.split(".")[-2])
def test_parameters_are_marked_as_they_are_cut(rule: Rule, sequence: bool, dtype: torch.dtype) -> None:
    """Megatron-Core counts what is whole on every rank once in the gradient's norm, and sums what sequence parallelism
    leaves in parts. Of a layer cut by rows of W, B is cut; of one cut by columns, A."""
    own = adapter(rule, Axis(0, 2), sequence=sequence, dtype=dtype)
    cut = "_A" if rule.sharding is Sharding.ROW else "_B"
    for name, parameter in own.named_parameters():
        assert parameter.dtype == dtype
        assert parameter.tensor_model_parallel is (cut in name), name
        assert parameter.sequence_parallel is (sequence and cut not in name), name


def test_fresh_adapters_are_within_pefts_bounds_and_fill_them() -> None:
    lora = LoRAConfig(rank=16, alpha=16.0, targets=["all-linear"])
    fresh = FreshAdapters(adapters_of(MODEL, lora), 0, torch.device("cpu"))
    for name in fresh.names():
        values = fresh.read(name, 0, 0, fresh.shape(name)[0])
        bound = 0.0 if "lora_B" in name else fresh.shape(name)[1] ** -0.5
        assert 0.95 * bound <= float(values.abs().max()) <= bound, name


def kept(own: Adapter) -> torch.Tensor:
    begin_pass(1, 2)
    return own._dropped(torch.ones(64, 8))[0] != 0


def test_there_are_layers_cut_either_way() -> None:
    assert {rule.sharding for rule in RULES} >= {Sharding.ROW} != {rule.sharding for rule in RULES}


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.hf[0].name.split(".")[-2])
def test_tensor_parallel_ranks_drop_the_same_inputs_where_they_have_the_same(rule: Rule, sequence: bool) -> None:
    """Where each has inputs of its own, equal masks would tie what is dropped of them together."""
    first, second = (kept(adapter(rule, Axis(rank, 2), sequence=sequence)) for rank in (0, 1))
    assert torch.equal(first, second) is not (rule.sharding is Sharding.ROW or sequence)
    assert torch.equal(first, kept(adapter(rule, Axis(0, 2), sequence=sequence)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.hf[0].name.split(".")[-2])
def test_one_rank_of_all_copies_writes_each_part_of_the_adapters(rule: Rule) -> None:
    writers: Counter[tuple[str, tuple[int, ...]]] = Counter()
    parts = set()
    for tp, dp in product(range(2), range(3)):
        for name, tensor in adapter(rule, Axis(tp, 2), Axis(dp, 3)).sharded("at."):
            assert name.startswith("at.")
            place = tensor.key, tuple(tensor.global_offset)
            parts.add(place)
            writers[place] += tensor.replica_id == (0, 0, 0)
            assert tensor.replica_id[-1] == dp
    assert writers == dict.fromkeys(parts, 1)
