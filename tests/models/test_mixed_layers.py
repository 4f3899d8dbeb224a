"""A family whose first layers are dense and whose others have experts, some with a mapped buffer; declared here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import nn

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout, chunks, state_names
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.config.actor import ActorConfig, ParallelConfig
from megatron_rl.models import Family, model_of, read_hf_config, registry
from megatron_rl.planning.memory import actor_parameters, trained_parameters
from megatron_rl.weights.check_shards import ShardProof
from megatron_rl.weights.files import SafetensorsFolder
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.inventory import local_weights
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import tiny
from .megatron import build, logits
from .mixed import BIASED, DENSE, FAMILY, LAYERS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """transformers' Qwen3 mixture with two dense layers, of the family here."""
    monkeypatch.setattr(registry, "FAMILIES", (FAMILY,))
    return tiny.write(tmp_path / "model", "qwen3_moe", mlp_only_layers=list(range(DENSE)))


def test_it_computes_what_transformers_computes_and_is_exported_unchanged(
    folder: Path, parallel: ParallelGroups
) -> None:
    config = read_hf_config(folder)
    model = model_of(config)
    built = build(model.family, model.description, parallel)
    assert sum(parameter.numel() for parameter in built[0].parameters()) == actor_parameters(model).total
    load_hf_weights(built, model.family, config, folder, parallel)
    expected = tiny.hf_logits(folder)
    torch.testing.assert_close(logits(built[0], tiny.tokens()), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())
    source = SafetensorsFolder(folder)
    exported = dict(iter_hf_weights(built, model.family, config, parallel))
    assert exported.keys() == source.names()
    assert all(torch.equal(value, source.read(name, 0, 0, value.shape[0])) for name, value in exported.items())


def test_megatron_core_looks_for_the_tensors_that_conversion_writes(folder: Path, parallel: ParallelGroups) -> None:
    model = model_of(read_hf_config(folder))
    [chunk] = build(model.family, model.description, parallel)
    states = chunk.sharded_state_dict().values()
    asked = {state.key: tuple(state.global_shape) for state in states if isinstance(state, ShardedTensor)}
    written = {name: part.shape for part in chunks(model, Layout()) for name in (part.name, *part.aliases)}
    assert asked.items() <= written.items()
    assert "decoder.layers.1.mlp.linear_fc2.weight" in asked  # it stacks layers only where all are alike
    extra = {state.unique_key for state in states if isinstance(state, ShardedObject)}
    assert extra <= set(state_names(model))


def test_stages_hold_their_own_layers_and_conversion_goes_both_ways(folder: Path, tmp_path: Path) -> None:
    model = model_of(read_hf_config(folder))
    whole = actor_parameters(model)
    first, last = (actor_parameters(model, pipeline=2, stage=stage) for stage in range(2))
    assert (first.expert, last.expert) == (0, whole.expert)
    assert (first + last).total == whole.total
    assert model.expert_layers == {2, 3}
    jobs.run(ToMegatron(folder, Layout(tensor=2, pipeline=2, expert=2)), tmp_path / "megatron", 1, print)
    jobs.run(ToHF(tmp_path / "megatron", folder), tmp_path / "hf", 1, print)
    before, after = SafetensorsFolder(folder), SafetensorsFolder(tmp_path / "hf")
    assert before.names() == after.names()
    for name in before.names():
        rows = before.shape(name)[0]
        assert torch.equal(before.read(name, 0, 0, rows), after.read(name, 0, 0, rows)), name


class Source(SafetensorsFolder):
    """The folder, with a bias for each expert of each router."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        names = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(DENSE, LAYERS)]
        self.biases = {name: torch.arange(8.0) + number for number, name in enumerate(names)}

    def names(self) -> set[str]:
        return super().names() | self.biases.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return (8,) if name in self.biases else super().shape(name)

    def dtype(self, name: str) -> str:
        return "F32" if name in self.biases else super().dtype(name)

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        return self.biases[name][start:stop] if name in self.biases else super().read(name, dim, start, stop)


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Family:
    monkeypatch.setattr(registry, "FAMILIES", (BIASED,))
    return BIASED


def test_a_buffer_is_loaded_compared_and_exported_as_a_parameter_is_and_not_trained(
    folder: Path, biased: Family, parallel: ParallelGroups
) -> None:
    config, source = read_hf_config(folder), Source(folder)
    model = model_of(config)
    built = build(model.family, model.description, parallel)
    load_hf_weights(built, model.family, config, source, parallel)
    held = {weight.name: weight.parameter for weight in local_weights(built, model, parallel) if weight.rule.buffer}
    assert list(held) == [f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (2, 3)]
    assert not any(isinstance(value, nn.Parameter) for value in held.values())
    proof = ShardProof(built, model.family, config, parallel)
    exported = dict(proof.watching(iter_hf_weights(built, model.family, config, parallel)))
    assert not proof.wrong()
    assert not proof.missing()
    assert exported.keys() == source.names()
    assert all(torch.equal(exported[name], bias) for name, bias in source.biases.items())
    name, bias = next(iter(source.biases.items()))
    list(proof.watching(iter([(name, bias + 1)])))
    assert proof.wrong() == [name]
    trained = trained_parameters(model, ActorConfig(parallel=ParallelConfig()))
    assert actor_parameters(model).total - trained.total == 2 * 8
