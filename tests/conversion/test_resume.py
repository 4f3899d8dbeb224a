"""A conversion that was killed continues, and ends with the very bytes of one that was not."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.checkpoint.manifest import StoredChunk

from .convert import assert_same, tensors


class _Dying:
    """A task that kills its process once so many tensors are written, in the middle of a file, as kill -9 would; or when all
    is written, if there are not so many."""

    def __init__(self, task: ToMegatron | ToHF, after: int) -> None:
        self._task, self._left = task, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def write(self, file: str, folder: Path, progress: jobs.Progress) -> list[StoredChunk]:
        def die(count: int) -> None:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return self._task.write(file, folder, die)

    def finish(self, folder: Path, pieces: Sequence[StoredChunk]) -> None:
        self._task.finish(folder, pieces)
        os.kill(os.getpid(), signal.SIGKILL)


def kill(task: ToMegatron | ToHF, target: Path, after: int) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=jobs.run, args=(_Dying(task, after), target, 1, lambda _: None)
    )
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("direction", ["to-megatron", "to-hf"])
def test_a_killed_conversion_continues_to_the_same_bytes(tmp_path: Path, direction: str) -> None:
    task: ToMegatron | ToHF = ToMegatron(tiny.write(tmp_path / "source", "qwen3"), Layout(2), file_bytes=20_000)
    if direction == "to-hf":
        jobs.run(task, tmp_path / "megatron", 1, lambda _: None)
        task = ToHF(tmp_path / "megatron", tmp_path / "megatron", file_bytes=20_000)
    whole, target, partial = tmp_path / "whole", tmp_path / "target", tmp_path / ".target.converting"
    jobs.run(task, whole, 1, lambda _: None)
    for after in (9, 9):  # killed twice, at the same distance from where it began
        kill(task, target, after)
        assert not target.exists()
    result = partial / "result"
    kept = {path.stem: (result / path.stem).stat().st_mtime_ns for path in (partial / "done").glob("*.json")}
    assert 2 <= len(kept) < len(task.files())
    unfinished = max(result.glob("*.distcp" if direction == "to-megatron" else "*.safetensors"), key=_age)
    assert unfinished.name not in kept
    said: list[str] = []
    jobs.run(task, target, 1, said.append)
    assert said == [f"continuing an interrupted conversion: {len(kept)} files are written"]
    assert contents(target) == contents(whole)
    assert {name: (target / name).stat().st_mtime_ns for name in kept} == kept  # not written again
    assert not partial.exists()
    assert jobs.run(task, target, 1, said.append) is False  # the same command once more
    assert "already the result" in said[-1]


def test_a_conversion_that_was_killed_at_its_end_has_nothing_to_write_again(tmp_path: Path) -> None:
    task = ToMegatron(tiny.write(tmp_path / "source", "qwen3", num_hidden_layers=2), Layout(), file_bytes=20_000)
    target, said = tmp_path / "target", list[str]()
    kill(task, target, 10**6)
    assert not target.exists()
    jobs.run(task, target, 1, said.append)
    assert said == [f"continuing an interrupted conversion: {len(task.files())} files are written"]
    left = tmp_path / ".target.converting" / "done"  # killed after the last move
    left.mkdir(parents=True)
    assert jobs.run(task, target, 1, said.append) is False
    assert not left.parent.exists()


def _age(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_what_was_begun_from_another_source_is_not_continued(tmp_path: Path) -> None:
    """The other has the same names and sizes, and the same times: object stores and archives round them."""
    source = tiny.write(tmp_path / "source", "qwen3", num_hidden_layers=2)
    kill(ToMegatron(source, Layout(), file_bytes=20_000), tmp_path / "megatron", 8)
    times = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    tiny.write(source, "qwen3", seed=1, num_hidden_layers=2)
    for path, time in times.items():
        os.utime(path, ns=(time, time))
    said: list[str] = []
    task = ToMegatron(source, Layout(), file_bytes=20_000)
    jobs.run(task, tmp_path / "megatron", 1, said.append)
    assert any("starting over" in text for text in said)
    back = ToHF(tmp_path / "megatron", tmp_path / "megatron")
    jobs.run(back, tmp_path / "back", 1, said.append)
    assert_same(tensors(tmp_path / "back"), tensors(source))


def test_several_processes_write_what_one_does(tmp_path: Path) -> None:
    task = ToMegatron(tiny.write(tmp_path / "source", "qwen3", num_hidden_layers=2), Layout(), file_bytes=20_000)
    jobs.run(task, tmp_path / "one", 1, lambda _: None)
    jobs.run(task, tmp_path / "two", 2, lambda _: None)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_error_in_a_worker_is_the_error_of_the_conversion(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", "qwen3", num_hidden_layers=2)
    task = ToMegatron(source, Layout(), file_bytes=20_000)
    jobs.run(task, tmp_path / "megatron", 1, lambda _: None)
    file = tmp_path / "megatron" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"__1_0\.distcp is damaged in tensor decoder\."):
        jobs.run(ToHF(tmp_path / "megatron", source, file_bytes=20_000), tmp_path / "hf", 2, lambda _: None)
