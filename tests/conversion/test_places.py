"""Where a source is read and a target is made: links, the current folder, disks, and folders that are none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from models import tiny

from megatron_rl.checkpoint.contents import contents
from megatron_rl.checkpoint.convert.source import BRIDGE_TRACKER, TRACKER, config_folder, megatron_folder
from megatron_rl.cli import main
from megatron_rl.weights.files import whole_folder

from .convert import assert_same, tensors, to_hf, to_megatron


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("places") / "hf", "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that says nothing of its model."""
    folder = tmp_path_factory.mktemp("plain") / "megatron"
    to_megatron(hf, folder)
    for name in ("manifest.json", "tensors.json", "config.json"):
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize("target", ["link", "link to nowhere", "."])
def test_the_folder_that_a_target_leads_to_is_made(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "link to nowhere").symlink_to(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "here")
    where = target if target == "." else str(tmp_path / target)
    assert main(["convert", "to-megatron", "--hf", str(hf), "--megatron", where]) == 0
    folder = {"link": tmp_path / "disk", "link to nowhere": tmp_path / "new", ".": tmp_path / "here"}[target]
    to_hf(folder, tmp_path / "back")
    assert_same(tensors(tmp_path / "back"), tensors(hf))
    assert not [*tmp_path.glob(".*")]


def test_a_disks_own_folder_is_no_target(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be replaced, which would be found when all is written."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    with pytest.raises(ValueError, match=r"disk is where a disk is mounted.*name a folder in it"):
        to_megatron(hf, tmp_path / "disk")
    to_megatron(hf, tmp_path / "disk" / "inside")


def test_a_file_is_no_folder(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect"], ["convert", "to-megatron", "--megatron", "out", "--hf"]):
        assert main([*words, str(hf / "model.safetensors")]) == 2
        assert "model.safetensors is not a folder" in capsys.readouterr().err


def test_a_tracker_that_names_no_iteration(tmp_path: Path) -> None:
    for content in (b"abc", b"", b"\xff\xfe", "²".encode()):
        (tmp_path / TRACKER).write_bytes(content)
        with pytest.raises(ValueError, match=f"{TRACKER} says .*, expected `release` or the number of an iteration"):
            megatron_folder(tmp_path)
    (tmp_path / TRACKER).unlink()
    (tmp_path / BRIDGE_TRACKER).touch()
    with pytest.raises(ValueError, match="holds no Megatron checkpoint"):
        megatron_folder(tmp_path)


@pytest.mark.parametrize("recipe", ["model: x", "- a", "3", "", "model: {path: 3}", "model: {path: [a]}"])
def test_a_recipe_that_names_no_model(plain: Path, tmp_path: Path, recipe: str) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_3"
    shutil.copytree(plain, step)
    (tmp_path / "run" / "recipe.yaml").write_text(recipe)
    with pytest.raises(ValueError, match=r"recipe\.yaml says that the model came from .*; name it with --config"):
        config_folder(step, None)


def test_damaged_words_about_a_plain_checkpoint(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "megatron"
    shutil.copytree(plain, folder)
    assert contents(folder).about["backend"] == json.loads((plain / "metadata.json").read_text())
    for content in (b"{", b"\xff", b"[" * 100_000):
        (folder / "metadata.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"metadata\.json cannot be read"):
            contents(folder)
    (folder / "metadata.json").unlink()
    assert contents(folder).about == {}


@pytest.mark.parametrize("content", ["[]", '{"tensors": [], "pieces": []}', '{"tensors": {"a": 1}, "pieces": []}'])
def test_a_list_of_pieces_that_is_none(hf: Path, tmp_path: Path, content: str) -> None:
    to_megatron(hf, tmp_path / "megatron")
    file = tmp_path / "megatron" / "tensors.json"
    file.write_text(content.ljust(file.stat().st_size))  # a length that manifest.json would not know is found before
    with pytest.raises(ValueError, match=r"tensors\.json cannot be read"):
        contents(tmp_path / "megatron")


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    """An export into a folder on another disk stays there, the second one too."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "export").symlink_to(tmp_path / "disk")
    for text in ("first", "second"):
        with whole_folder(tmp_path / "export") as temporary:
            (temporary / "file").write_text(text)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "export"]
        assert (tmp_path / "export").is_symlink()
        assert [(path.name, path.read_text()) for path in (tmp_path / "disk").iterdir()] == [("file", text)]
