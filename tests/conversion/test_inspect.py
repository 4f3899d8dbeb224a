"""What the inspection says of a checkpoint, and of two."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from models import tiny
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint import contents as inspected
from megatron_rl.checkpoint.contents import contents, difference
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.source import HFFolder
from megatron_rl.cli import main

from .convert import to_hf, to_megatron


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source` -> `megatron` -> `hf`, and `other` with one weight changed."""
    root = tmp_path_factory.mktemp("inspect")
    source = tiny.write(root / "source", "qwen3", num_hidden_layers=2)
    to_megatron(source, root / "megatron", Layout(2))
    to_hf(root / "megatron", root / "hf")
    tiny.write(root / "other", "qwen3", num_hidden_layers=2)
    held = load_file(root / "other" / "model.safetensors")
    held["model.norm.weight"][3] += 0.5
    save_file(held, root / "other" / "model.safetensors")
    return root


def test_kinds_layouts_and_sizes(root: Path) -> None:
    source, megatron = contents(root / "source"), contents(root / "megatron")
    assert (source.kind, megatron.kind) == ("Hugging Face", "converted checkpoint")
    assert (
        megatron.about["layout"] | {"tensor": 2, "vocabulary": 61, "padded_vocabulary": 62} == megatron.about["layout"]
    )
    values = source.totals()["model"]["values"]
    padding = 2 * 32  # a row in embedding and output layer
    assert megatron.totals()["model"]["values"] == values + padding
    assert source.totals()["model"]["bytes"] == 4 * values


def test_the_difference_of_two_is_found_by_name_and_size(root: Path) -> None:
    assert difference(root / "source", root / "megatron").identical
    found = difference(root / "megatron", root / "other")
    assert not found.identical
    [changed] = [d for d in found.tensors if d.changed]
    assert (changed.name, changed.changed, changed.values) == ("model.norm.weight", 1, 32)
    assert changed.max_abs == pytest.approx(0.5)
    norm = math.sqrt(sum(float(x) ** 2 for x in load_file(root / "source" / "model.safetensors")["model.norm.weight"]))
    assert changed.relative == pytest.approx(0.5 / norm)


def test_the_difference_is_summed_over_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in blocks of 3, 3 and 1; equal values differ nowhere, whatever they are."""
    monkeypatch.setattr(inspected, "_BLOCK", 3 * 8 * 5 + 8)
    a = torch.arange(35.0).view(7, 5)
    a[0, 1], a[1, 0], a[6, 4] = torch.nan, torch.inf, -torch.inf
    b = a.clone()

    def found() -> inspected.Difference:
        for name, tensor in (("a", a), ("b", b)):
            (tmp_path / name).mkdir(exist_ok=True)
            save_file({"w": tensor}, tmp_path / name / "model.safetensors")
        return inspected._difference("w", *(HFFolder(tmp_path / name) for name in "ab"))

    assert found() == inspected.Difference("w", 35, 0, 0.0, 0.0)
    b[2, 2], b[3, 0], b[6, 0] = b[2, 2] + 2, b[3, 0] - 3, b[6, 0] + 1
    norm = float(a[a.isfinite()].double().square().sum())
    one = found()
    assert (one.changed, one.max_abs) == (3, 3.0)
    assert one.relative == pytest.approx(math.sqrt(14 / norm), rel=1e-12)
    b[5, 0] = torch.nan  # on one side only
    assert (found().changed, found().max_abs, found().relative) == (4, math.inf, math.inf)
    a, b = torch.zeros(2, 2), torch.eye(2)
    assert found().relative == math.inf
    b = torch.zeros(2, 3)
    assert found() == inspected.Difference("w", 4, 4, math.inf, math.inf, "shape (2, 2) and (2, 3)")


def test_numbers_without_dimensions_are_compared(tmp_path: Path) -> None:
    """As scales of weights in FP8 are, one for each."""
    for name, value in (("first", 2.0), ("second", 3.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file(
            {"a.weight_scale": torch.tensor(value), "b": torch.empty(0, 3)}, tmp_path / name / "model.safetensors"
        )
    assert difference(tmp_path / "first", tmp_path / "first").identical
    [changed, empty] = difference(tmp_path / "first", tmp_path / "second").tensors
    assert (changed.values, changed.changed, changed.max_abs, changed.relative) == (1, 1, 1.0, 0.5)
    assert (empty.values, empty.changed) == (0, 0)


def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root / "megatron"), "--tensors", "--check"]) == 0
    shown = capsys.readouterr().out
    assert "converted checkpoint" in shown
    assert "every checksum fits" in shown
    assert main(["inspect", str(root / "hf"), str(root / "other"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is False
    assert main(["inspect", str(tmp_path)]) == 2
    assert "no Megatron checkpoint" in capsys.readouterr().err


def test_damage_is_reported_with_its_tensor(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_megatron(root / "source", tmp_path / "megatron")
    path = tmp_path / "megatron" / "__0_0.distcp"
    with path.open("r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        file.write(b"\x55\xaa\x55\xaa")
    assert main(["inspect", str(tmp_path / "megatron"), "--check"]) == 1
    assert "damaged in tensor" in capsys.readouterr().out
