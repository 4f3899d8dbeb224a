"""A file that is written in the background: its content, and what becomes of a write that fails."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.convert import write_behind
from megatron_rl.checkpoint.convert.write_behind import WriteBehind


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "_BLOCK", 8192)


def test_the_file_holds_what_was_written(tmp_path: Path) -> None:
    data = os.urandom(123_456)
    with WriteBehind(tmp_path / "a") as file:
        assert file.write([data[:10]]) == manifest.digest(data[:10])
        assert file.write([memoryview(data)[10:20], data[20:70_000]]) == manifest.digest(data[10:70_000])
        assert file.write([data[90_000:]], at=90_000) == manifest.digest(data[90_000:])
        file.write([data[70_000:90_000]], at=70_000)
    assert (tmp_path / "a").read_bytes() == data


def test_a_file_system_without_direct_writes_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refusing(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    monkeypatch.setattr(write_behind.os, "open", refusing)
    test_the_file_holds_what_was_written(tmp_path)


def test_a_direct_write_that_the_file_system_refuses_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with larger pages does, and any with what is left of a write that it cut within a page."""
    written, refused = os.pwrite, []

    def refusing(file: int, data: memoryview, offset: int) -> int:
        if threading.current_thread() is not threading.main_thread() and offset not in refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(file, data, offset)

    monkeypatch.setattr(write_behind.os, "pwrite", refusing)
    test_the_file_holds_what_was_written(tmp_path)
    assert refused


@pytest.mark.parametrize("writes_after", [0, 5])
def test_a_write_that_fails_behind_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes_after: int
) -> None:
    def full(self: WriteBehind, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WriteBehind, "_put", full)

    def write() -> None:
        with WriteBehind(tmp_path / "a") as file:
            for _ in range(1 + writes_after):
                file.write([bytes(8192)])

    with pytest.raises(OSError, match="No space left"):
        write()


def test_an_error_of_the_writers_own_is_the_one_that_is_raised(tmp_path: Path) -> None:
    def write() -> None:
        with WriteBehind(tmp_path / "a") as file:
            file.write([bytes(5000)])
            raise KeyError("x")

    with pytest.raises(KeyError):
        write()
