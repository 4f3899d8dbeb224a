"""Small conversions for the tests of this folder, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.weights.files import SafetensorsFolder


def to_megatron(hf: Path, target: Path, layout: Layout = Layout(), **options: Any) -> ToMegatron:
    task = ToMegatron(hf, layout, **options)
    jobs.run(task, target, 1, lambda _: None)
    return task


def to_hf(megatron: Path, target: Path, config: Path | None = None, **options: Any) -> ToHF:
    task = ToHF(megatron, config or megatron, **options)
    jobs.run(task, target, 1, lambda _: None)
    return task


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = SafetensorsFolder(folder)
    return {name: files.read(name, 0, 0, files.shape(name)[0]) for name in files.names()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
