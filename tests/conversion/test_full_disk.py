"""A disk that fills in a conversion: the file is named, nothing half done looks whole, and the same command continues."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.checkpoint.manifest import StoredChunk
from megatron_rl.cli import main

from .test_resume import contents

DIRECTIONS = ["to-megatron", "to-hf"]


@contextlib.contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file of this process may grow beyond it: what a full disk is, without one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class _FullAtTheEnd:
    """A task for whose last files there is no room."""

    def __init__(self, task: ToMegatron | ToHF) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def finish(self, folder: Path, pieces: Sequence[StoredChunk]) -> None:
        with small_files(100):
            self._task.finish(folder, pieces)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    tiny.write(root / "hf", "qwen3", num_hidden_layers=2)
    jobs.run(ToMegatron(root / "hf", Layout(2), file_bytes=20_000), root / "megatron", 1, lambda _: None)
    jobs.run(ToHF(root / "megatron", root / "megatron", file_bytes=20_000), root / "whole-to-hf", 1, lambda _: None)
    (root / "whole-to-megatron").symlink_to(root / "megatron")
    return root


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_command_names_the_file_and_continues(
    sources: Path, tmp_path: Path, direction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, megatron = ("--hf", "--megatron") if direction == "to-megatron" else ("--megatron", "--hf")
    source, target = sources / hf.removeprefix("--"), tmp_path / "target"
    arguments = [hf, str(source), megatron, str(target), "--shard-size", "20KB"]
    arguments += ["--tensor", "2"] if direction == "to-megatron" else []
    whole = contents(sources / f"whole-{direction}")
    shards = sorted(len(data) for name, data in whole.items() if name.endswith((".distcp", ".safetensors")))
    with small_files(shards[-1] - 1):
        assert main(["convert", direction, *arguments]) == 1
    said = capsys.readouterr().err
    assert "File too large" in said
    assert str(tmp_path / ".target.converting" / "result" / ("__" if direction == "to-megatron" else "model-0")) in said
    assert "make room, then the same command continues" in said
    assert not target.exists()
    assert main(["convert", direction, *arguments]) == 0
    assert "continuing an interrupted conversion" in capsys.readouterr().out
    assert contents(target) == whole


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_room_for_the_last_files_costs_only_them(sources: Path, tmp_path: Path, direction: str) -> None:
    task: ToMegatron | ToHF = ToMegatron(sources / "hf", Layout(2), file_bytes=20_000)
    if direction == "to-hf":
        task = ToHF(sources / "megatron", sources / "megatron", file_bytes=20_000)
    target, said = tmp_path / "target", list[str]()
    with pytest.raises((OSError, RuntimeError)) as error:
        jobs.run(_FullAtTheEnd(task), target, 1, said.append)
    assert isinstance(error.value, OSError)
    assert error.value.errno == errno.EFBIG
    assert not target.exists()
    jobs.run(task, target, 1, said.append)
    assert said == [f"continuing an interrupted conversion: {len(task.files())} files are written"]
    assert contents(target) == contents(sources / f"whole-{direction}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]
