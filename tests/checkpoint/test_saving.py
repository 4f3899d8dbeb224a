"""What is saved is the step it is named for, also while training goes on; what fails is said; what is damaged is named."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.checkpoint import manifest, store
from megatron_rl.weights.files import whole_folder
from tests.actor.layouts import make_models
from tests.actor.processes import spawn
from tests.checkpoint.hostile import HIDING_PLACES
from tests.checkpoint.ranks import Layout, contents, save_in_every_way, try_to_load

pytestmark = pytest.mark.ranks
RANKS = range(2)
VICTIM = "decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("saving")
    make_models(folder)
    tiny = folder / "tiny"
    tiny.mkdir()
    mounted = os.geteuid() == 0 and not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tiny)], stderr=subprocess.DEVNULL
    )
    if not mounted:
        tiny.rmdir()
    try:
        spawn(save_in_every_way, 2, str(folder))
        yield folder
    finally:
        if mounted:
            subprocess.check_call(["umount", str(tiny)])


def facts(root: Path, rank: int) -> dict[str, Any]:
    return torch.load(root / f"facts_{rank}.pt", weights_only=False)


# ------------------------------------------------------------------------------------------------------- asynchronous
@pytest.mark.parametrize("rank", RANKS)
def test_training_goes_on_while_it_is_written(root: Path, rank: int) -> None:
    found = facts(root, rank)
    assert found["busy"]
    assert not found["there"], "current before it was written"
    assert not found["busy after"]
    assert found["outcomes"] == [(1, None), (2, None), (3, None)]


def test_an_asynchronous_save_has_what_a_synchronous_one_has(root: Path) -> None:
    want, own = contents(root / "sync" / "step_1"), contents(root / "async" / "step_1")
    assert want.keys() == own.keys()
    assert [name for name in want if not torch.equal(own[name], want[name])] == []


@pytest.mark.parametrize("rank", RANKS)
def test_a_synchronous_save_writes_weights_from_where_they_are(root: Path, rank: int) -> None:
    assert facts(root, rank)["uncopied"]


@pytest.mark.parametrize("step", [1, 2])
def test_two_successive_checkpoints_differ(root: Path, step: int) -> None:
    before, after = (contents(root / "async" / f"step_{n}") for n in (step, step + 1))
    learned = [name for name in before if "optimizer" not in name or "exp_avg" in name]
    assert [name for name in learned if torch.equal(before[name], after[name])] == []


# ------------------------------------------------------------------------------------------------- saves that fail
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_learns_why_a_save_failed_and_the_next_one_heals(root: Path, rank: int) -> None:
    found = facts(root, rank)
    assert found["failures"].keys() == {4, 5, 7, 9}
    assert "Input/output error" in found["failures"][4]
    assert "MemoryError: no memory" in found["failures"][9]
    assert "Stale file handle" in found["failures"][9]
    assert "File too large" in found["failures"][5]
    assert found["failures"][7] is None
    assert found["last"] == 7
    assert sorted(path.name for path in (root / "async").iterdir()) == ["step_1", "step_2", "step_3", "step_7"]


def test_a_save_without_room_is_refused_before_it_writes(root: Path) -> None:
    found = facts(root, 1)
    if "no room" not in found:
        pytest.skip("no small file system could be mounted")
    [error] = found["no room"]
    assert re.search(r"it needs [\d.]+ \w+ and .* has [\d.]+ \w+ free", error)
    assert " 0.00 " not in error
    assert list((root / "tiny").iterdir()) == []


# ------------------------------------------------------------------------------------------------------ corruptions
@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    assert manifest.verify(root / "sync" / "step_1") == []
    return shutil.copytree(root / "sync" / "step_1", tmp_path / "step_1")


def place(folder: Path, name: str = VICTIM) -> manifest.StoredChunk:
    return next(piece for piece in manifest.read_tensors(folder)[1] if piece.name == name)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_found_with_file_and_tensor(copy: Path) -> None:
    piece = place(copy)
    flip(copy / piece.file, piece.offset + piece.length // 2)
    assert manifest.missing(copy) is None, "sizes do not show it"
    [problem] = manifest.verify(copy)
    assert piece.file in problem
    assert f"tensor {VICTIM} " in problem


def test_ranks_divide_the_reading_and_miss_nothing(copy: Path) -> None:
    pieces = manifest.read_tensors(copy)[1]
    for parts in (1, 2, 7):
        shares = [manifest._share(pieces, part, parts) for part in range(parts)]
        assert [piece for share in shares for piece in share] == pieces
    piece = place(copy)
    flip(copy / piece.file, piece.offset)
    assert len([problem for part in range(3) for problem in manifest.verify(copy, part, 3)]) == 1


def test_what_a_rank_reads_to_check_is_what_its_node_loads() -> None:
    """At the layout of the save: 16 nodes of 8 ranks, whose files have the same size to 20 %, in the order of their names."""
    sizes = {rank: 1000 + 7 * (rank * 37 % 29) for rank in range(128)}
    written = [
        manifest.StoredChunk(f"tensor {rank}.{part}", (), f"__{rank}_0.distcp", part * size // 10, size // 10, "")
        for rank, size in sizes.items()
        for part in range(10)
    ]
    pieces = sorted(written, key=lambda piece: (piece.file, piece.offset))
    at_home = sum(
        piece.length
        for rank in range(128)
        for piece in manifest._share(pieces, rank, 128)
        if int(piece.file.split("_")[2]) // 8 == rank // 8
    )
    assert at_home > 0.9 * sum(piece.length for piece in pieces)


def test_a_truncated_shard_is_found_with_file_and_tensor(copy: Path) -> None:
    piece = place(copy)
    with (copy / piece.file).open("r+b") as file:
        file.truncate(piece.offset + 1)
    problem = manifest.missing(copy)
    assert problem is not None
    assert piece.file in problem
    assert f"it held tensor {VICTIM}" in problem
    assert manifest.verify(copy) == [problem]


def test_a_missing_shard_is_found_with_file_and_tensor(copy: Path) -> None:
    piece = place(copy)
    (copy / piece.file).unlink()
    problem = manifest.missing(copy)
    assert problem is not None
    assert f"{piece.file} is missing; it held tensor " in problem


@pytest.mark.parametrize(
    "name", ["common.pt", ".metadata", "metadata.json", "state.json", "tensors.json", "manifest.json"]
)
def test_a_flipped_byte_in_a_file_without_tensors_is_found(copy: Path, name: str) -> None:
    flip(copy / name, (copy / name).stat().st_size // 2)
    problems = manifest.verify(copy)
    assert any(name in problem for problem in problems), problems


def test_every_byte_of_every_file_is_covered(copy: Path) -> None:
    tensors, pieces = manifest.read_tensors(copy)
    for name, about in manifest.read(copy)["files"].items():
        if "blake3" not in about:
            own = sorted((p for p in pieces if p.file == name), key=lambda piece: piece.offset)
            ends = [0, *(piece.offset + piece.length for piece in own)]
            assert [piece.offset for piece in own] == ends[:-1], "a gap"
            assert ends[-1] == about["bytes"] == (copy / name).stat().st_size
    assert {path.name for path in copy.iterdir()} == {*manifest.read(copy)["files"], "manifest.json"}
    assert tensors[VICTIM].dtype == "float32"


def test_a_file_with_tensors_that_is_not_there_in_full_is_no_checkpoint(tmp_path: Path) -> None:
    """What a rank wrote on another machine may not have come to the shared disk."""
    pieces = [manifest.StoredChunk("a", (0,), "__1_0.distcp", 0, 8, manifest.digest(b"12345678"))]
    with pytest.raises(OSError, match=r"__1_0\.distcp has 0 bytes, 8 were written"):
        manifest.write(tmp_path, {}, {"a": manifest.TensorInfo((1,), "int64")}, pieces)
    (tmp_path / "__1_0.distcp").write_bytes(b"1234")
    with pytest.raises(OSError, match=r"__1_0\.distcp has 4 bytes, 8 were written"):
        manifest.write(tmp_path, {}, {"a": manifest.TensorInfo((1,), "int64")}, pieces)
    assert not (tmp_path / "manifest.json").exists()


def test_all_of_a_folder_is_on_the_disk_before_it_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    (tmp_path / "inner").mkdir()
    for name in (".metadata", "inner/chat.jinja"):
        (tmp_path / name).write_text("x")
    manifest.write(tmp_path, {}, {}, [])
    assert set(synced) >= {str(path) for path in (tmp_path, *tmp_path.rglob("*"))}
    synced.clear()
    with whole_folder(tmp_path / "export") as temporary:
        (temporary / "model.safetensors").write_text("x")
    assert set(synced) == {str(temporary / "model.safetensors"), str(temporary), str(tmp_path)}


def test_nothing_is_continued_that_an_interrupted_save_left(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "sync" / "step_1", tmp_path / ".step_2.writing")
    shutil.copytree(root / "sync" / "step_1", tmp_path / "step_3")
    (tmp_path / "step_3" / "manifest.json").unlink()
    assert store.newest(tmp_path) is None
    shutil.copytree(root / "sync" / "step_1", tmp_path / "step_1")
    assert store.newest(tmp_path) == tmp_path / "step_1"
    store.keep(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_3"]


# ----------------------------------------------------------------------------- whole, but not of this model or recipe
Tensors, Pieces = dict[str, manifest.TensorInfo], list[manifest.StoredChunk]


def renamed(tensors: Tensors, pieces: Pieces) -> tuple[Tensors, Pieces]:
    changed = {("decoder.renamed" if name == VICTIM else name): tensor for name, tensor in tensors.items()}
    return changed, [replace(p, name="decoder.renamed") if p.name == VICTIM else p for p in pieces]


def another_dtype(tensors: Tensors, pieces: Pieces) -> tuple[Tensors, Pieces]:
    return tensors | {VICTIM: replace(tensors[VICTIM], dtype="bfloat16")}, pieces


def another_shape(tensors: Tensors, pieces: Pieces) -> tuple[Tensors, Pieces]:
    return tensors | {VICTIM: replace(tensors[VICTIM], shape=(6, 64, 97))}, pieces


CHANGES: dict[str, tuple[Callable[[Tensors, Pieces], tuple[Tensors, Pieces]], list[str]]] = {
    "renamed": (renamed, [f"it has no tensor {VICTIM}", "has tensor decoder.renamed, which the model has not"]),
    "dtype": (another_dtype, [f"tensor {VICTIM} in __", "is bfloat16, the model wants float32"]),
    "shape": (another_shape, [f"tensor {VICTIM} in __", "has the shape [6, 64, 97], the model wants [6, 64, 96]"]),
}


@pytest.fixture(scope="module")
def said(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Change -> what loading a checkpoint with it says; its manifest fits, as if it had been written like that."""
    folders, hostile = {}, {}
    for name, (change, _) in CHANGES.items():
        folder = tmp_path_factory.mktemp(name) / "step_1"
        shutil.copytree(root / "sync" / "step_1", folder)
        (folder / "manifest.json").unlink()
        (folder / "tensors.json").unlink()
        manifest.write(folder, {}, *change(*manifest.read_tensors(root / "sync" / "step_1")))
        folders[name] = str(folder)
    for name, poison in HIDING_PLACES.items():
        folder = shutil.copytree(root / "sync" / "step_1", tmp_path_factory.mktemp(name) / "step_1")
        poison(folder, folder / "ran")
        hostile[name] = str(folder)
    good = str(root / "sync" / "step_1")
    spawn(try_to_load, 2, str(root), Layout(tensor=2), [*folders.values(), good], [*hostile.values()])
    first = torch.load(root / f"said_{Layout(tensor=2).name}_1.pt")
    rest = {"good": first[good], "groups": first["groups"]}
    for name, folder in hostile.items():
        rest |= {f"ran {name}": str((Path(folder) / "ran").exists())}
        rest |= {f"{what} {name}": first[f"{what} of {folder}"] for what in ("all", "model")}
    return {name: first[folder] for name, folder in folders.items()} | rest


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_the_model_is_refused_by_tensor_and_file(said: dict[str, str], change: str) -> None:
    assert said["good"] == "loaded"
    for part in CHANGES[change][1]:
        assert part in said[change]


@pytest.mark.parametrize(
    ("place", "file"),
    [("metadata", ".metadata"), ("planner", ".metadata"), ("common", "common.pt"), ("object", "__9_0.distcp")],
)
def test_a_checkpoint_cannot_run_a_command(said: dict[str, str], place: str, file: str) -> None:
    """`all` is what a resume reads, `model` what an evaluation does."""
    assert said[f"ran {place}"] == "False"
    assert file in said[f"all {place}"]
    assert "names posix.system, which is not one of the classes" in said[f"all {place}"]
    assert said[f"model {place}"] == said[f"all {place}"]


def test_the_recipes_betas_epsilon_and_weight_decay_win_over_the_checkpoints(said: dict[str, str]) -> None:
    groups = ast.literal_eval(said["groups"])
    assert groups
    assert set(groups) == {((0.5, 0.6), 1e-5, 0.3)}


# ------------------------------------------------------------------------------------------------------------ retention
@pytest.mark.parametrize(
    ("newest", "best", "kept"), [(2, 0, [4, 5]), (1, 2, [1, 3, 5]), (1, 3, [1, 3, 4, 5]), (9, 0, [1, 2, 3, 4, 5])]
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, newest: int, best: int, kept: list[int]) -> None:
    scores = {1: 0.5, 2: math.nan, 3: 0.5, 4: 0.2}  # 5 has none
    for step in range(1, 6):
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        state = {"scores": {"eval/t/avg@1": scores[step]} if step in scores else {}}
        (folder / "state.json").write_text(json.dumps(state))
    store.keep(tmp_path, newest, best, "eval/t/avg@1")
    assert sorted(store.step_of(path) for path in tmp_path.iterdir()) == kept
