"""The model that a recipe describes is the one that is trained, whatever an earlier run has left in the run folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatron_rl.config.model import CreateModelConfig, ModelConfig
from megatron_rl.config.schema import Config
from megatron_rl.trainer.report import Reporter
from megatron_rl.trainer.run import model_folder

SMALL: dict[str, Any] = {"layers": 1, "hidden_size": 32, "ffn_size": 32}


def folder_of(run_dir: Path, seed: int = 0, rank: int = 0, **create: Any) -> Path:
    config = Config(
        run_dir=str(run_dir),
        seed=seed,
        model=ModelConfig(create=CreateModelConfig(**(SMALL | create)), dtype="float32"),
    )
    grid: Any = SimpleNamespace(is_main=rank == 0)
    report = Reporter(config, run_dir, grid)
    try:
        return model_folder(config, report, run_dir)
    finally:
        report.close()


def hidden_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["hidden_size"])


def test_the_same_recipe_finds_its_model_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path)
    before = (folder / "config.json").stat().st_mtime_ns
    assert folder_of(tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert list(tmp_path.iterdir()) == [folder]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 64}, "model.create.hidden_size 32 there and 64 here"),
        ({"seed": 1}, "seed 0 there and 1 here"),
        ({"words": ["ab"]}, r"model.create.words [] there and ['ab'] here"),
    ],
)
def test_another_recipes_model_is_moved_away_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], named: str
) -> None:
    old = load_file(folder_of(tmp_path) / "model.safetensors")
    folder = folder_of(tmp_path, rank=1, **change)  # only rank 0 touches it
    assert hidden_size(folder) == 32
    folder = folder_of(tmp_path, **change)
    said = capsys.readouterr().out
    assert f"{folder} was not made from this recipe ({named}): moved to {tmp_path / 'previous_1'}" in said
    assert hidden_size(folder) == change.get("hidden_size", 32)
    assert hidden_size(tmp_path / "previous_1" / "model") == 32
    new = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    same = new[name].shape == old[name].shape and bool((new[name] == old[name]).all())
    assert same == ("words" in change), "weights depend on sizes and seed only"


def test_a_file_that_was_changed_since_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "generation_config.json").unlink()
    folder_of(tmp_path)
    assert "(generation_config.json changed; model.safetensors changed)" in capsys.readouterr().out
    again = load_file(folder / "model.safetensors")
    assert all((again[name] == tensor).all() for name, tensor in weights.items())


def test_a_model_that_does_not_say_what_it_was_made_from_is_made_anew(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, hidden_size=64)
    (folder / "made_from.json").unlink()
    assert hidden_size(folder_of(tmp_path)) == 32
