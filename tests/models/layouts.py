"""What every rank checks of a model in several layouts; `test_layouts` and the tests with Transformer Engine do it."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.models import Family, family_for, read_hf_config
from megatron_rl.weights.check_shards import ShardProof
from megatron_rl.weights.export import export_hf
from megatron_rl.weights.files import SafetensorsFolder
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.stacked import opened

from . import tiny
from .megatron import build, logits, start, stop


@dataclass(frozen=True)
class Layout:
    variant: str
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    virtual: int = 1
    expert_tensor: int = 1


def _tensors(folder: Path, family: Family) -> dict[str, torch.Tensor]:
    files = opened(SafetensorsFolder(folder), family)
    return {name: files.read(name, 0, 0, files.shape(name)[0]) for name in files.names()}


def check(rank: int, world: int, rendezvous: str, root: str, layouts: list[Layout]) -> None:
    for number, layout in enumerate(layouts):
        folder, export = Path(root) / layout.variant, Path(root) / f"export-{number}"
        axes = (layout.tensor, layout.pipeline, layout.expert, layout.virtual, layout.expert_tensor)
        parallel = start(rank, world, f"{rendezvous}-{number}", *axes)
        config = read_hf_config(folder)
        family = family_for(config)
        chunks = build(family, family.describe(config), parallel, layout.virtual)
        load_hf_weights(chunks, family, config, folder, parallel)
        source = _tensors(folder, family)
        order = None
        for bucket_bytes in (1, 20_000, 2**28):
            weights = iter_hf_weights(chunks, family, config, parallel, bucket_bytes)
            found = {name: value.clone() for name, value in weights}
            assert found.keys() == source.keys(), f"{layout}, rank {rank}"
            assert order in (None, list(found))
            order = list(found)
            for name, value in source.items():
                assert torch.equal(found[name], value), f"{layout}, rank {rank}: {name} differs"
        _check_proof((chunks, family, config, parallel), found, layout)
        export_hf(export, chunks, family, config, parallel, folder, shard_bytes=50_000)
        assert SafetensorsFolder(export).names() == SafetensorsFolder(folder).names()
        exported = _tensors(export, family)
        assert exported.keys() == source.keys()
        assert all(torch.equal(exported[name], value) for name, value in source.items())
        if number == 0:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (20_000, limits[1])
            )  # a disk that is full, for the one that writes
            with pytest.raises(RuntimeError, match=r"export to .* failed"):
                export_hf(Path(root) / "failed", chunks, family, config, parallel, folder)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if layout.pipeline == 1:
            expected = torch.load(folder / "logits.pt")
            close = {"rtol": 1e-5, "atol": 1e-5 * float(expected.abs().max())}
            torch.testing.assert_close(logits(chunks[0], tiny.tokens())[..., : tiny.VOCAB], expected, **close)
        stop()


def _next_alike(name: str, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The next tensor of the same shape; the same one where there is no other."""
    names = list(whole)
    after = names[names.index(name) + 1 :] + names
    return next(whole[other] for other in after if whole[other].shape == whole[name].shape)


def _stale(value: torch.Tensor) -> torch.Tensor:
    changed = value.clone()
    changed.view(-1)[value.numel() // 2].nextafter_(torch.tensor(9.0))
    return changed


FAULTS: list[Callable[[str, Mapping[str, torch.Tensor]], torch.Tensor | None]] = [
    lambda name, whole: None,  # missing
    lambda name, whole: torch.zeros_like(whole[name]),
    lambda name, whole: whole[name].flip(*range(whole[name].dim())),
    lambda name, whole: _stale(whole[name]),
    lambda name, whole: whole[name][:-1],
    _next_alike,
]


def _check_proof(actor: tuple[Any, ...], whole: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """The ranks together find every fault of every tensor, and where each second one is whole, not that."""
    for fault in FAULTS:
        for damaged in (set(whole), set(list(whole)[::2]), set()):
            sent = {name: fault(name, whole) if name in damaged else value for name, value in whole.items()}
            proof = ShardProof(*actor)
            given = [(name, value) for name, value in sent.items() if value is not None]
            assert len(list(proof.watching(iter(given)))) == len(given)
            by_rank: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
            dist.all_gather_object(by_rank, (proof.wrong(), proof.missing()))
            wrong, missing = ({name for names in by_rank for name in names[i]} for i in range(2))
            assert missing == {name for name, value in sent.items() if value is None}, layout
            assert wrong == {name for name in damaged - missing if sent[name] is not whole[name]}, layout
