"""Names in shared memory and folders of sockets: removed once their owner is dead, and never before."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.runtime import leftovers
from megatron_rl.seams import vllm_segments

# A rank in the middle of its engine's start: it has segments and a folder with a socket, says where, and waits.
OWNER = """
import socket, sys
from pathlib import Path
from megatron_rl.runtime import leftovers
leftovers.SHARED_MEMORY = Path(sys.argv[1])
with leftovers.claimed_segments(), leftovers.claimed_folder() as folder:
    (leftovers.SHARED_MEMORY / f"{leftovers.run_prefix()}-abc").touch()
    socket.socket(socket.AF_UNIX).bind(str(folder / "s"))
    print(folder, flush=True)
    sys.stdin.read()
    leftovers.remove_segments()
"""


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """A shared memory and a temporary folder that are nobody else's, with paths short enough for sockets."""
    root = Path(tempfile.mkdtemp(prefix="left-", dir="/tmp"))
    shared, temporary = root / "shm", root / "t"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", shared)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("MASTER_PORT", "23456")
    yield shared, temporary
    shutil.rmtree(root)


def owner(shared: Path, temporary: Path, port: int = 23456) -> subprocess.Popen[str]:
    environment = {**os.environ, "MASTER_PORT": str(port), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", OWNER, str(shared)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(str(temporary))
    return process


def names(*folders: Path) -> list[str]:
    return sorted(path.name[:12] for folder in folders for path in folder.iterdir())


def test_a_living_runs_names_stay_and_a_killed_ones_go(places: tuple[Path, Path]) -> None:
    living, killed = owner(*places), owner(*places, port=20001)
    assert len(names(*places)) == 6
    assert leftovers.remove_abandoned() == []
    killed.kill()
    killed.communicate()
    assert len(names(*places)) == 6, "what a killed run leaves"
    removed = leftovers.remove_abandoned()
    assert sorted(path.name for path in removed if path.parent == places[0]) == [
        "megatron_rl-20001-abc",
        "megatron_rl-20001.lock",
    ]
    assert names(*places) == ["megatron_rl-", "megatron_rl-", "mrl-sockets-"]
    living.communicate("")
    assert living.returncode == 0
    assert names(*places) == [], "a run that ends its start removes its own"


def test_of_two_ranks_of_a_run_the_one_that_lives_keeps_the_names(places: tuple[Path, Path]) -> None:
    one, other = owner(*places), owner(*places)
    one.send_signal(signal.SIGKILL)
    one.communicate()
    assert [path.parent for path in leftovers.remove_abandoned()] == [places[1]], "the dead rank's sockets only"
    other.kill()
    other.communicate()
    leftovers.remove_abandoned()
    assert names(*places) == []


def test_what_only_looks_like_ours_stays(places: tuple[Path, Path]) -> None:
    shared, temporary = places
    for name in (
        "psm_1234",
        "megatron_rl-notes",
        "megatron_rl-20001-abc",
    ):  # the last has no lock file: not of this version
        (shared / name).touch()
    (temporary / "mrl-sockets-mine").mkdir()
    (temporary / "mrl-sockets-mine" / "thesis.tex").touch()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(temporary / "mrl-sockets-mine" / "s"))
    before = names(*places)
    assert leftovers.remove_abandoned() == []
    assert names(*places) == before
    assert (temporary / "mrl-sockets-mine" / "s").is_socket()


def test_a_start_whose_names_are_removed_before_it_has_locked_them_makes_them_again(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, between = fcntl.flock, [True, True, False, True, False]
    removed: list[Path] = []

    def after_a_removal(lock: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and between.pop(0):  # another run's start comes between making and locking
            removed.extend(leftovers.remove_abandoned())
        flock(lock, operation)

    monkeypatch.setattr(leftovers.fcntl, "flock", after_a_removal)
    with leftovers.claimed_segments(), leftovers.claimed_folder() as folder:
        assert len(removed) == 3
        assert leftovers.remove_abandoned() == []
        assert folder.is_dir()
        assert (places[0] / "megatron_rl-23456.lock").exists()
    assert between == []


def test_a_segment_has_its_runs_name_and_says_where_room_was_missing(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", Path("/dev/shm"))
    with vllm_segments.named_segments(leftovers.SHARED_MEMORY):
        segment = shared_memory.SharedMemory(create=True, size=64)
        attached = shared_memory.SharedMemory(name=segment.name)
    try:
        assert segment.name.startswith("megatron_rl-23456-")
        assert attached.buf.obj is not None
        leftovers.remove_segments()
        assert not (Path("/dev/shm") / segment.name).exists()
    finally:
        attached.close()
        segment.close()
        segment.unlink()  # as vLLM does when the engine is deleted: the name is gone
    with pytest.raises(OSError, match=r"bytes\): '/dev/shm/megatron_rl-23456-"):
        vllm_segments.NamedSegment(create=True, size=2**60)


def test_a_full_shared_memory_is_named_where_the_error_names_nothing(places: tuple[Path, Path]) -> None:
    from megatron_rl.rollout import environment

    def start(error: OSError) -> None:
        alone: Any = SimpleNamespace(rank=0, barrier=lambda: None, link=None)
        with environment.engine_start(alone):
            raise error

    with pytest.raises(OSError, match=rf"No space left on device: '{places[0]}'"):
        start(OSError(errno.ENOSPC, "No space left on device"))  # what a semaphore's creation raises
    with pytest.raises(OSError, match=r"No space left on device: '/cache/x'"):
        start(OSError(errno.ENOSPC, "No space left on device", "/cache/x"))
    assert leftovers.remove_abandoned() == [places[0] / "megatron_rl-23456.lock"], "for the launcher"
    assert names(*places) == []
