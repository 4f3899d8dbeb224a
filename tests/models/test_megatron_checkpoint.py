"""Megatron-Core itself reads what conversion writes, and conversion reads what Megatron-Core writes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_rl.checkpoint.convert import jobs, open_weights
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.models import family_for, read_hf_config
from megatron_rl.seams.megatron_cpu import MegatronOnCpu
from megatron_rl.weights.files import SafetensorsFolder
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import tiny
from .megatron import build, spawn, start, stop


def convert(task: ToMegatron | ToHF, target: Path) -> Path:
    jobs.run(task, target, 1, lambda _: None)
    return target


def empty_model(folder: Path, parallel: ParallelGroups) -> list[nn.Module]:
    config = read_hf_config(folder)
    family = family_for(config)
    return build(family, family.describe(config), parallel)


def filled_model(folder: Path, parallel: ParallelGroups) -> list[nn.Module]:
    config, chunks = read_hf_config(folder), empty_model(folder, parallel)
    load_hf_weights(chunks, family_for(config), config, folder, parallel)
    return chunks


def load(chunks: list[nn.Module], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    with MegatronOnCpu():
        wanted = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}  # type: ignore[operator]
        loaded = dist_checkpointing.load(wanted, str(folder))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"], strict=True)


def save(chunks: list[nn.Module], folder: Path, **arguments: Any) -> Path:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    folder.mkdir(exist_ok=True)
    with MegatronOnCpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = {f"model{i}": chunk.sharded_state_dict(**arguments) for i, chunk in enumerate(chunks)}  # type: ignore[operator]
        dist_checkpointing.save(tensors, str(folder), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))
    return folder


def assert_same_parameters(found: list[nn.Module], expected: list[nn.Module]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        biases = [pair for pair in ours.named_buffers() if pair[0].endswith("expert_bias")]
        values = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
        for name, parameter in (*ours.named_parameters(), *biases):
            assert torch.equal(parameter, values[name]), name


def assert_same_files(found: Path, expected: Path) -> None:
    a, b = SafetensorsFolder(found), SafetensorsFolder(expected)
    assert a.names() == b.names()
    for name in b.names():
        rows = b.shape(name)[0]
        assert torch.equal(a.read(name, 0, 0, rows), b.read(name, 0, 0, rows)), name


@pytest.mark.parametrize(
    "variant", ["qwen2", "qwen3-tied", "llama", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_5"]
)
def test_megatron_loads_a_conversion_for_any_layout(tmp_path: Path, parallel: ParallelGroups, variant: str) -> None:
    source = tiny.write(tmp_path / "source", variant, num_hidden_layers=2)
    layout = Layout(2, 2, 4 if "moe" in variant or variant in ("deepseek_v3", "gpt_oss") else 1)
    converted = convert(ToMegatron(source, layout), tmp_path / "megatron")
    chunks = empty_model(source, parallel)
    load(chunks, converted)
    assert_same_parameters(chunks, filled_model(source, parallel))


def test_a_model_starts_from_a_conversion_as_from_its_source(tmp_path: Path, parallel: ParallelGroups) -> None:
    source = tiny.write(tmp_path / "source", "qwen3_moe", num_hidden_layers=2)
    converted = convert(ToMegatron(source, Layout(2, 1, 2)), tmp_path / "megatron")
    config, chunks = read_hf_config(converted), empty_model(converted, parallel)
    load_hf_weights(chunks, family_for(config), config, open_weights(converted), parallel)
    assert_same_parameters(chunks, filled_model(source, parallel))


# What `sharded_state_dict` is asked for: a wrapper's prefix, a tensor per layer and expert.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "stacked": ("qwen2-tied", {}),
    "stacked experts": ("qwen3_moe", {}),
    "mixed layers, latent attention": ("deepseek_v3", {}),
    "prefix": ("llama", {"prefix": "module.model."}),
    "layer by layer": ("qwen3", {"metadata": {"non_homogeneous_layers": True}}),
    "stacked experts with biases": ("gpt_oss", {}),
    "expert by expert with biases": ("gpt_oss", {"metadata": {"singleton_local_shards": True}}),
    "expert by expert": ("qwen3_moe", {"metadata": {"singleton_local_shards": True}}),
}


@pytest.mark.parametrize("form", FORMS)
def test_plain_checkpoints_in_every_form(tmp_path: Path, parallel: ParallelGroups, form: str) -> None:
    variant, arguments = FORMS[form]
    source = tiny.write(tmp_path / "source", variant, num_hidden_layers=2)
    checkpoint = save(filled_model(source, parallel), tmp_path / "megatron", **arguments)
    back = convert(ToHF(checkpoint, source), tmp_path / "back")
    assert_same_files(back, source)


def _there_and_back(
    rank: int, world: int, rendezvous: str, root: str, variant: str, axes: tuple[int, int, int]
) -> None:
    folder = Path(root) / variant
    parallel = start(rank, world, rendezvous + variant, *axes)
    chunks = empty_model(folder, parallel)
    load(chunks, Path(root) / f"{variant}-megatron")
    assert_same_parameters(chunks, filled_model(folder, parallel))
    save(chunks, Path(root) / f"{variant}-saved")
    stop()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("variant", "axes"),
    [
        ("qwen2-tied", (2, 1, 1)),
        ("qwen3", (1, 2, 1)),
        ("qwen3_moe", (1, 1, 2)),
        ("deepseek_v3", (2, 2, 1)),
        ("gpt_oss", (1, 1, 2)),
        ("llama", (4, 1, 1)),
        ("qwen3_5_moe", (2, 1, 1)),
    ],
)
def test_ranks_of_a_layout_load_and_save(tmp_path: Path, variant: str, axes: tuple[int, int, int]) -> None:
    """Cut for another layout than it is loaded at; llama has 2 key/value heads and 4 tensor-parallel ranks."""
    source = tiny.write(tmp_path / variant, variant, num_hidden_layers=2)
    convert(ToMegatron(source, Layout(1, 2)), tmp_path / f"{variant}-megatron")
    spawn(_there_and_back, axes[0] * axes[1] * axes[2], tmp_path, str(tmp_path), variant, axes)
    assert_same_files(convert(ToHF(tmp_path / f"{variant}-saved", source), tmp_path / "back"), source)
