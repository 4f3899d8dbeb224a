"""Folders that do not fit the model: each is refused, with the tensor's, file's and field's name."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models import family_for, read_hf_config
from megatron_rl.weights.export import export_hf
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import tiny
from .megatron import build

WEIGHTS = "model.safetensors"
Q_NORM, LM_HEAD = "model.layers.1.self_attn.q_norm.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("source") / "model", "qwen3", num_hidden_layers=2)


def copy(source: Path, target: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**read_hf_config(source), **config}))
    save_file(load_file(source / WEIGHTS) if tensors is None else tensors, target / WEIGHTS)
    return target


def load(folder: Path, parallel: ParallelGroups, built_from: Path | None = None) -> list[Any]:
    config = read_hf_config(folder)
    family = family_for(config)
    shape = read_hf_config(built_from or folder)
    built = family_for(shape)
    chunks = build(built, built.describe(shape), parallel)
    load_hf_weights(chunks, family, config, folder, parallel)
    return chunks


def test_missing_tensor(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[Q_NORM]
    with pytest.raises(ValueError, match=f"lacks {Q_NORM}"):
        load(copy(folder, tmp_path / "m", tensors), parallel)


def test_unexpected_tensor(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    tensors = {**load_file(folder / WEIGHTS), "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(copy(folder, tmp_path / "m", tensors), parallel)


@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_layers(tmp_path: Path, folder: Path, parallel: ParallelGroups, layers: int) -> None:
    changes = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    with pytest.raises(ValueError, match=f"num_hidden_layers = {layers}"):
        load(copy(folder, tmp_path / "m", **changes), parallel)


@pytest.mark.parametrize(
    ("field", "value"), [("intermediate_size", 64), ("vocab_size", 60), ("hidden_size", 16), ("head_dim", 8)]
)
def test_another_models_config(tmp_path: Path, folder: Path, parallel: ParallelGroups, field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"model.*has shape.*config.json makes it.*{field}.* = "):
        load(copy(folder, tmp_path / "m", **{field: value}), parallel)


def test_tied_config_with_a_different_output_layer(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    with pytest.raises(ValueError, match=r"tie_word_embeddings = True, but lm_head\.weight differs"):
        load(copy(folder, tmp_path / "m", tie_word_embeddings=True), parallel)


def test_tied_config_with_a_copy_of_the_embedding(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[LM_HEAD] = tensors["model.embed_tokens.weight"].clone()
    load(copy(folder, tmp_path / "m", tensors, tie_word_embeddings=True), parallel)


def test_untied_config_without_output_layer(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[LM_HEAD]
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight; config\.json says tie_word_embeddings = False"):
        load(copy(folder, tmp_path / "m", tensors), parallel)


def test_old_rotary_buffers_are_passed_over(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    tensors = {**load_file(folder / WEIGHTS), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    load(copy(folder, tmp_path / "m", tensors), parallel)


def test_truncated_file(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    target = copy(folder, tmp_path / "m")
    content = (target / WEIGHTS).read_bytes()
    (target / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"cannot read .*{WEIGHTS}"):
        load(target, parallel)


def test_missing_shard_and_renamed_tensor(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    config = read_hf_config(folder)
    family = family_for(config)
    export_hf(tmp_path / "m", load(folder, parallel), family, config, parallel, folder, shard_bytes=20_000)
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 2
    tensors = load_file(shards[1])
    name, value = tensors.popitem()
    save_file({**tensors, name + "x": value}, shards[1])
    with pytest.raises(ValueError, match=f"{shards[1].name} does not hold {name}"):
        load(tmp_path / "m", parallel)
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"{shards[1].name} is missing"):
        load(tmp_path / "m", parallel)


def test_folder_without_weights(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    target = copy(folder, tmp_path / "m")
    (target / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors files$"):
        load(target, parallel)
    (target / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(ValueError, match="save_pretrained make them"):
        load(target, parallel)


def test_a_folder_with_two_models(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    """transformers would take one of them, vLLM the other."""
    config = read_hf_config(folder)
    chunks = load(folder, parallel)
    export_hf(tmp_path / "m", chunks, family_for(config), config, parallel, folder, shard_bytes=20_000)
    save_file(load_file(folder / WEIGHTS), tmp_path / "m" / WEIGHTS)
    with pytest.raises(ValueError, match=r"holds two models: model\.safetensors"):
        load(tmp_path / "m", parallel)


def test_a_module_built_otherwise(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    plain = tiny.write(tmp_path / "llama", "llama", num_hidden_layers=2, head_dim=16)
    with pytest.raises(ValueError, match=r"no parameter for model\.layers\.0\.self_attn\.q_norm"):
        load(folder, parallel, built_from=plain)
    biased = tiny.write(tmp_path / "qwen2", "qwen2", num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"linear_qkv\.bias of the Megatron model is not in the weight map"):
        load(folder, parallel, built_from=biased)


def test_weights_are_cast_to_the_parameters_dtype(folder: Path, parallel: ParallelGroups) -> None:
    config = read_hf_config(folder)
    family = family_for(config)
    chunks = [chunk.to(torch.bfloat16) for chunk in build(family, family.describe(config), parallel)]
    load_hf_weights(chunks, family, config, folder, parallel)
    source = load_file(folder / WEIGHTS)
    for name, value in iter_hf_weights(chunks, family, config, parallel):
        assert torch.equal(value, source[name].bfloat16())


def test_quantised_weights(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[Q_NORM] = tensors[Q_NORM].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=f"{Q_NORM} .* has dtype F8_E4M3"):
        load(copy(folder, tmp_path / "m", tensors), parallel)


def test_a_disk_too_small_for_the_export(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    config = read_hf_config(folder)
    chunks = load(folder, parallel)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"export to .* failed: cannot write .*model|File too large"):
            export_hf(tmp_path / "m", chunks, family_for(config), config, parallel, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_removed(tmp_path: Path, folder: Path, parallel: ParallelGroups) -> None:
    config = read_hf_config(folder)
    chunks = load(folder, parallel)
    gone, kept = subprocess.Popen(["true"]), tmp_path / f".m.{os.getppid()}.tmp"
    gone.wait()
    kept.mkdir()  # of a process that lives
    (tmp_path / f".m.{gone.pid}.tmp").mkdir()
    (tmp_path / f".m.{gone.pid}.tmp" / "0.safetensors").write_text("half")
    (tmp_path / f".m.{gone.pid}.old").mkdir()
    (tmp_path / f".m.{gone.pid}.old" / "config.json").write_text("of the export before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"export to .* failed"):
            export_hf(tmp_path / "m", chunks, family_for(config), config, parallel, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "m" / "config.json").read_text() == "of the export before"
    export_hf(tmp_path / "m", chunks, family_for(config), config, parallel, folder)
    assert (tmp_path / "m" / WEIGHTS).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([kept.name, "m"])


def test_a_failed_export_leaves_nothing_and_keeps_the_old_folder(
    tmp_path: Path, folder: Path, parallel: ParallelGroups
) -> None:
    config = read_hf_config(folder)
    family = family_for(config)
    chunks = load(folder, parallel)
    export_hf(tmp_path / "m", chunks, family, config, parallel, folder)
    before = (tmp_path / "m" / WEIGHTS).read_bytes()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RuntimeError, match=r"export to .* failed"):
        export_hf(tmp_path / "m", chunks, family, config, parallel, tmp_path / "source")
    assert [path.name for path in tmp_path.iterdir() if path.name != "source"] == ["m"]
    assert (tmp_path / "m" / WEIGHTS).read_bytes() == before
