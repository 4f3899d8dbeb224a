"""A file that is flushed while it is written: its content, and what becomes of a flush that fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_rl.checkpoint.convert import write_behind
from megatron_rl.checkpoint.convert.write_behind import WriteBehind


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "_STRETCH", 1000)


def test_the_file_holds_what_was_written(tmp_path: Path) -> None:
    data = os.urandom(12_345)
    with WriteBehind(tmp_path / "a") as file:
        assert file.write(data[:10]) == 10
        assert file.write(memoryview(data)[10:7000]) == 6990
        file.write_at(data[9000:], 9000)
        file.write_at(data[7000:9000], 7000)
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("writes_after", [0, 5])
def test_a_flush_that_fails_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes_after: int) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(write_behind.os, "fdatasync", full)

    def write() -> None:
        with WriteBehind(tmp_path / "a") as file:
            for _ in range(1 + writes_after):
                file.write(bytes(1000))

    with pytest.raises(OSError, match="No space left"):
        write()


def test_an_error_of_the_writers_own_is_the_one_that_is_raised(tmp_path: Path) -> None:
    def write() -> None:
        with WriteBehind(tmp_path / "a") as file:
            file.write(bytes(5000))
            raise KeyError("x")

    with pytest.raises(KeyError):
        write()
