"""Loading into Megatron in several processes, and reading the same bits back on every one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.schema import CreateModelConfig
from megatron_rl.models import create_model, export_hf, family_for, iter_hf_weights, load_hf_weights, read_hf_config
from tests.models.megatron import build, spawn, start, stop


def _round_trip(
    rank: int, world: int, rendezvous: str, folder: str, tensor: int, pipeline: int, expert: int, virtual: int
) -> None:
    parallel = start(rank, world, rendezvous, tensor, pipeline, expert, virtual)
    config = read_hf_config(folder)
    family = family_for(config)
    chunks = build(family.describe(config), parallel, virtual)
    load_hf_weights(chunks, family, config, folder, parallel)
    source = load_file(Path(folder) / "model.safetensors")
    for bucket_bytes in (1, 20_000, 2**28):
        found = {name: value.clone() for name, value in iter_hf_weights(chunks, family, config, parallel, bucket_bytes)}
        assert found.keys() == source.keys()
        for name, value in source.items():
            assert torch.equal(found[name], value), f"rank {rank}: {name} differs"
    export_hf(f"{folder}-export", chunks, family, config, parallel, folder, shard_bytes=100_000)
    stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline", "virtual", "tied"),
    [(2, 1, 1, False), (1, 2, 2, True), (2, 2, 1, True), (4, 1, 1, False)],
    ids=["tp2", "pp2-virtual2-tied", "tp2-pp2-tied", "tp4-of-2-kv-heads"],
)
def test_every_rank_reads_back_the_file(tmp_path: Path, tensor: int, pipeline: int, virtual: int, tied: bool) -> None:
    config = CreateModelConfig(layers=4, hidden_size=32, head_dim=8, ffn_size=48, vocab_size=37, tie_embeddings=tied)
    create_model(tmp_path / "model", config, seed=3)
    arguments = (str(tmp_path / "model"), tensor, pipeline, 1, virtual)
    spawn(_round_trip, tensor * pipeline, tmp_path, *arguments)
    exported = {}
    for path in (tmp_path / "model-export").glob("*.safetensors"):
        exported |= load_file(path)
    source = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], value) for name, value in source.items())
