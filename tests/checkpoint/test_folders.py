"""Folders of checkpoints and their manifests, without any rank: which one counts, which go, what is damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl.checkpoint import manifest, store
from megatron_rl.runtime.distributed import ALONE, ProcessGrid

PIECES = [
    manifest.StoredChunk("a", (0, 0), "__0_0.distcp", 0, 6, manifest.digest(b"abcdef")),
    manifest.StoredChunk("a", (1, 0), "__0_0.distcp", 6, 2, manifest.digest(b"gh")),
    manifest.StoredChunk("b.c", (0,), "__0_0.distcp", 8, 4, manifest.digest(b"ijkl")),
]
TENSORS = {"a": manifest.TensorInfo((2, 3), "float16"), "b.c": manifest.TensorInfo((1,), "float32")}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in several blocks."""
    monkeypatch.setattr(manifest, "_BLOCK", 5)


@pytest.fixture
def alone() -> Iterator[ProcessGrid]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield replace(ALONE, host_group=dist.group.WORLD)
    dist.destroy_process_group()


def made(folder: Path, step: int | None = None, **state: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"abcdefghijkl")
    step = store.step_of(folder) if step is None else step
    progress = {"step": step, "warm_up": 0}
    (folder / "state.json").write_text(json.dumps({"progress": progress, **state}))
    manifest.write(folder, {"step": step}, TENSORS, PIECES)
    return folder


def change(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# -------------------------------------------------------------------------------------------------------------- manifest
def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    folder = made(tmp_path / "step_3")
    assert manifest.read_tensors(folder) == (TENSORS, PIECES)
    about = manifest.read(folder)
    assert about["step"] == 3
    assert {name: file["bytes"] for name, file in about["files"].items()} == {
        name: (folder / name).stat().st_size for name in ("__0_0.distcp", "state.json", "tensors.json")
    }
    assert manifest.verify(folder) == []
    digests = manifest.digests(folder)
    assert digests["__0_0.distcp"] == manifest.digest(b"abcdefghijkl")
    assert digests.keys() == {*about["files"], "manifest.json"}


@pytest.mark.parametrize(("offset", "tensor"), [(5, "a (bytes 0"), (7, "a (bytes 6"), (8, "b.c (bytes 8")])
def test_a_changed_byte_is_named_by_its_piece(tmp_path: Path, offset: int, tensor: str) -> None:
    folder = made(tmp_path / "step_3")
    change(folder / "__0_0.distcp", offset)
    [problem] = manifest.verify(folder)
    assert problem.startswith(f"__0_0.distcp is damaged in tensor {tensor} and on): its checksum is ")
    assert bool(manifest.verify(folder, skip_prefix="b.")) is (offset < 8)
    assert [problem] == [found for part in range(3) for found in manifest.verify(folder, part, 3)]


def test_files_without_tensors_are_read_once_and_before_the_tensors(tmp_path: Path) -> None:
    folder = made(tmp_path / "step_3")
    change(folder / "state.json", 3)
    change(folder / "__0_0.distcp", 3)
    assert manifest.verify(folder) == manifest.verify(folder, 0, 2) == ["state.json is damaged"]
    assert manifest.verify(folder, 1, 2) == []


@pytest.mark.parametrize(
    ("size", "said"),
    [(11, "it held tensor b.c"), (6, "it held tensor a and 1 more"), (8, "it held tensor b.c"), (12, None), (13, "")],
)
def test_a_file_of_another_length_names_what_it_lost(tmp_path: Path, size: int, said: str | None) -> None:
    folder = made(tmp_path / "step_3")
    (folder / "__0_0.distcp").write_bytes(b"abcdefghijklm"[:size])
    lost = f"; {said}" if said else ""
    expected = None if said is None else f"__0_0.distcp has {size} bytes, 12 were written{lost}"
    assert manifest.missing(folder) == expected
    assert manifest.verify(folder) == ([] if expected is None else [expected])


def test_a_listed_tensor_needs_data(tmp_path: Path) -> None:
    folder = made(tmp_path / "step_3")
    manifest.write(folder, {}, TENSORS | {"z": TENSORS["a"], "y": TENSORS["a"]}, PIECES)
    assert manifest.verify(folder) == ["tensor y has no data", "tensor z has no data"]
    assert manifest.verify(folder, 1, 2) == []


def test_another_format_or_another_checksum_is_no_manifest(tmp_path: Path) -> None:
    folder = made(tmp_path / "step_3")
    path = folder / manifest.MANIFEST
    content = json.loads(path.read_text())
    for other, said in (
        (content | {"format": 2}, "is of format 2, and this version reads format 1"),
        ([], "is of format None, and this version reads format 1"),
        ({}, "is of format 0, and this version reads format 1"),
        (content | {"step": 4}, "is damaged: its own checksum does not fit"),
    ):
        path.write_text(json.dumps(other))
        assert str(manifest.missing(folder)).endswith(said)
    path.write_text("{")
    assert "manifest.json cannot be read" in str(manifest.missing(folder))


# ------------------------------------------------------------------------------------------------------- which one counts
def test_the_newest_that_is_whole_and_in_its_place_is_chosen(tmp_path: Path, alone: ProcessGrid) -> None:
    assert store.choose(tmp_path / "none", alone, pytest.fail) is None
    for step in (2, 9, 10, 11, 12):
        made(tmp_path / f"step_{step}", step=7 if step == 11 else None, run="ours" if step < 12 else "theirs")
    change(tmp_path / "step_10" / "__0_0.distcp", 0)
    (tmp_path / "step_13").mkdir()
    (tmp_path / "step_14.old").mkdir()
    (tmp_path / "xstep_15").mkdir()
    said: list[str] = []
    assert store.choose(tmp_path, alone, said.append, "ours") == tmp_path / "step_9"
    starts = ["step_13: its manifest.json", "step_12: it is of another run (theirs; this one is ours)"]
    starts += ["step_11: it is the checkpoint of step 7", "step_10: __0_0.distcp is damaged in tensor a"]
    assert [text.startswith(f"skipping {start}") for text, start in zip(said, starts, strict=True)] == [True] * 4
    assert store.choose(tmp_path, alone, said.append) == tmp_path / "step_12"
    assert store.newest(tmp_path) == tmp_path / "step_12"  # which reads no tensor


def test_of_the_warm_up_only_where_rl_has_none(tmp_path: Path) -> None:
    assert store.newest_of_run(tmp_path) is None
    warm = made(tmp_path / "sft" / "checkpoints" / "step_40")
    assert store.newest_of_run(tmp_path) == warm
    assert store.name_of(warm) == "step_40 of the warm-up"
    first = made(tmp_path / "checkpoints" / "step_1")
    assert store.newest_of_run(tmp_path) == first
    assert store.name_of(first) == "step_1"


def test_a_warm_up_is_placed_by_its_own_steps(tmp_path: Path) -> None:
    progress = {"step": 0, "warm_up": 40}
    for step, warm_up, problems in (
        (40, True, []),
        (0, False, []),
        (40, False, ["it is the checkpoint of step 0"]),
        (0, True, ["it is the checkpoint of step 40"]),
    ):
        folder = tmp_path / str(warm_up) / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"progress": progress, "warm_up": warm_up}))
        assert store.misplaced(folder, "ours") == problems  # an older one does not say whose it is


def test_a_conversion_among_checkpoints_is_none_of_a_run(tmp_path: Path, alone: ProcessGrid) -> None:
    conversion = made(tmp_path / "step_12")
    (conversion / "state.json").unlink()
    manifest.write(conversion, {"kind": "conversion"}, *manifest.read_tensors(conversion))
    assert store.verify(conversion, alone) == []
    made(tmp_path / "step_9", 9)
    said: list[str] = []
    assert store.choose(tmp_path, alone, said.append) == store.newest(tmp_path) == tmp_path / "step_9"
    assert len(said) == 1
    assert said[0].startswith("skipping step_12: ")
    with pytest.raises(
        store.CheckpointError, match=r"step_12 is not a run's checkpoint: its state\.json cannot be read"
    ):
        store.read_state(conversion)
    assert store.score_of(conversion, "score") is None


def test_a_message_names_a_few_problems() -> None:
    assert store.summarize(["a", "b", "c"]) == "a; b; c"
    assert store.summarize(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"


# ------------------------------------------------------------------------------------------------------------ which ones go
def test_later_steps_are_put_aside(tmp_path: Path) -> None:
    for step in (5, 10, 20, 100):
        made(tmp_path / f"step_{step}")
    assert store.archive(tmp_path, 100) == []
    (tmp_path / "previous_1").mkdir()
    moved = [tmp_path / "previous_2" / f"step_{step}" for step in (100, 20)]
    assert store.archive(tmp_path, 10) == moved
    assert all(manifest.missing(folder) is None for folder in moved)
    assert [folder.name for folder in store.all_checkpoints(tmp_path)] == ["step_10", "step_5"]


def test_what_an_interrupted_save_left_goes_and_nothing_else(tmp_path: Path) -> None:
    for name in ("step_1", "step_2", ".step_3.writing", ".step_2.old", "previous_1", "notes"):
        (tmp_path / name).mkdir()
    store.keep(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "previous_1", "step_2"]


def test_the_score_of_a_checkpoint(tmp_path: Path) -> None:
    scored = made(tmp_path / "step_1", scores={"eval/t/avg@1": 0.25, "eval/u/avg@1": math.nan})
    assert store.score_of(scored, "eval/t/avg@1") == 0.25
    assert store.score_of(scored, "eval/u/avg@1") is store.score_of(scored, "eval/v/avg@1") is None
    assert store.score_of(made(tmp_path / "step_2"), "eval/t/avg@1") is None
    (scored / "state.json").write_text("{")
    assert store.score_of(scored, "eval/t/avg@1") is None
    assert store.score_of(tmp_path / "step_3", "eval/t/avg@1") is None
