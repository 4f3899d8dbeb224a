"""A run folder belongs to one run: a second one is refused, and what a dead one left behind is taken over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl.checkpoint.saver import Saver
from megatron_rl.checkpoint.snapshot import Snapshot
from megatron_rl.runtime import postmortem
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.owner import FILE, OwnedError, Owner, Ownership, of_this_rank, read

ELSEWHERE = Owner("node7", 4242, 1, "another boot pid:[1]", "2026-01-01T00:00:00+00:00")


def leave(folder: Path, owner: Owner, age: float = 0.0) -> Path:
    """What a run that was killed leaves in its folder."""
    path = folder / FILE
    path.write_text(json.dumps(asdict(owner)))
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_a_second_run_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    first = Ownership(tmp_path)
    assert first.take() is None
    with pytest.raises(OwnedError, match=rf"process {os.getpid()} on .*, since .* another run_dir"):
        Ownership(tmp_path).take()
    first.release()
    assert not (tmp_path / FILE).exists()
    assert Ownership(tmp_path).take() is None


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from megatron_rl.runtime.owner import *\n"
        "try: Ownership(Path(sys.argv[1])).take(); print('mine', flush=True); sys.stdin.read()\n"
        "except OwnedError: print('refused')"
    )
    leave(tmp_path, replace(Owner.me(), pid=2**22 - 7))  # and all of them see that its owner is dead
    command = [sys.executable, "-c", code, str(tmp_path)]
    contenders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    said = [contender.stdout.readline().strip() for contender in contenders if contender.stdout is not None]
    for contender in contenders:
        contender.communicate(timeout=60)  # the owner holds it until now
    assert sorted(said) == ["mine", *["refused"] * 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


@pytest.mark.parametrize(
    "change", [{"pid": 2**22 - 7}, {"started": 1}], ids=["no such process", "its number is reused"]
)
def test_a_dead_owner_on_this_host_is_replaced_at_once(tmp_path: Path, change: dict[str, int]) -> None:
    dead = replace(Owner.me(), **change)
    leave(tmp_path, dead)
    begin = time.monotonic()
    own = Ownership(tmp_path)
    assert own.take() == dead
    assert time.monotonic() - begin < 5
    assert read(tmp_path) is not None
    own.release()


def test_an_owner_elsewhere_that_is_silent_is_replaced(tmp_path: Path) -> None:
    leave(tmp_path, ELSEWHERE, age=61)
    assert Ownership(tmp_path, beat_seconds=0.2).take() == ELSEWHERE


def test_a_clock_that_was_set_back_does_not_keep_a_silent_owner(tmp_path: Path) -> None:
    leave(tmp_path, ELSEWHERE, age=-7200)
    begin = time.monotonic()
    assert Ownership(tmp_path, beat_seconds=0.2, stale_seconds=1).take() == ELSEWHERE
    assert time.monotonic() - begin > 1


def test_an_owner_elsewhere_that_may_just_have_died_is_watched(tmp_path: Path) -> None:
    leave(tmp_path, ELSEWHERE, age=1)
    begin = time.monotonic()
    assert Ownership(tmp_path, beat_seconds=0.2, stale_seconds=3).take() == ELSEWHERE
    assert time.monotonic() - begin > 1.5


@pytest.mark.parametrize("age", [1, 7200], ids=["", "the clock was set since its last beat"])
def test_an_owner_elsewhere_that_beats_is_not(tmp_path: Path, age: float) -> None:
    path = leave(tmp_path, ELSEWHERE, age)
    end = threading.Event()

    def beat() -> None:
        while not end.wait(0.3):
            os.utime(path)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with pytest.raises(OwnedError, match="process 4242 on node7"):
            Ownership(tmp_path, beat_seconds=2, stale_seconds=30).take()
    finally:
        end.set()
        heart.join()
    assert read(tmp_path) == ELSEWHERE


def test_a_file_that_a_full_disk_cut_short_does_not_lock_the_folder_for_good(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"host": "no')
    assert Ownership(tmp_path, beat_seconds=0.2, stale_seconds=1).take() is None
    assert read(tmp_path) is not None


def test_the_owner_beats_and_notices_when_the_folder_was_taken_from_it(tmp_path: Path) -> None:
    own = Ownership(tmp_path, beat_seconds=0.1)
    own.take()
    os.utime(tmp_path / FILE, (1, 1))
    deadline = time.monotonic() + 20
    while (tmp_path / FILE).stat().st_mtime < 2:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.05)
    own.check()
    leave(tmp_path, ELSEWHERE)
    while own.lost is None:
        assert time.monotonic() < deadline, "it did not notice"
        time.sleep(0.05)
    with pytest.raises(OwnedError, match="taken over by process 4242 on node7"):
        own.check()
    own.release()
    assert read(tmp_path) == ELSEWHERE, "what is another's is not removed"


def test_a_rank_writes_on_behalf_of_the_command_that_started_it(tmp_path: Path) -> None:
    command = subprocess.Popen(["sleep", "60"])
    try:
        holder = replace(Owner.me(), pid=command.pid, started=0)
        environment = Ownership(tmp_path, holder).variables()
        leave(tmp_path, holder)
        rank = of_this_rank(tmp_path, environment)
        assert rank.take() is None
        rank.check()
        rank.release()
        assert read(tmp_path) == holder, "the command gives the folder back, not its rank"
        leave(tmp_path, ELSEWHERE)
        with pytest.raises(OwnedError, match="taken over by process 4242 on node7"):
            of_this_rank(tmp_path, environment).take()
    finally:
        command.kill()
        command.wait()
    assert of_this_rank(tmp_path / "another", {}).take() is None


def test_an_owner_that_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(OwnedError, match=r"owner\.json is a folder.*remove it"):
        Ownership(tmp_path, stale_seconds=0).take()
    assert (tmp_path / FILE).is_dir()


def test_a_run_folder_that_was_removed_or_renamed_is_named(tmp_path: Path) -> None:
    own = Ownership(tmp_path / "run")
    own.take()
    (tmp_path / "run").rename(tmp_path / "renamed")
    with pytest.raises(OwnedError, match=r"run_dir .*/run is gone: it was removed or renamed"):
        own.check()
    own.release()
    assert not (tmp_path / "run").exists()


@pytest.fixture
def alone() -> Iterator[ProcessGrid]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ProcessGrid(0, 1, 1, 0, 1, 0, 1, 0, 1, 0, dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", ["", "sft/"], ids=["RL", "warm-up"])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_a_save_does_not_bring_a_renamed_run_folder_back(
    tmp_path: Path, alone: ProcessGrid, stage: str, asynchronous: bool
) -> None:
    run_dir = tmp_path / "run"
    own = Ownership(run_dir)
    own.take()
    saver = Saver(run_dir, run_dir / f"{stage}checkpoints", alone, asynchronous, after=lambda: None)
    run_dir.rename(tmp_path / "renamed")
    saver.submit(1, Snapshot([]), {}, {"state.json": b"{}", "templates/chat.jinja": b""})
    saver.close()
    [outcome] = saver.outcomes()
    assert "No such file or directory" in str(outcome.error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["renamed"]
    with pytest.raises(OwnedError, match="it was removed or renamed"):
        own.check()
    own.release()


@pytest.mark.parametrize("removed", [True, False])
def test_another_folder_in_the_run_folders_place_is_not_taken_for_it(tmp_path: Path, removed: bool) -> None:
    run_dir = tmp_path / "run"
    own = Ownership(run_dir)
    own.take()
    own.check()
    if removed:
        shutil.rmtree(run_dir)
    else:
        run_dir.rename(tmp_path / "renamed")
    run_dir.mkdir()
    with pytest.raises(OwnedError, match=r"run_dir .*/run is gone: it was removed or renamed"):
        own.check()
    with pytest.raises(OwnedError, match=r"run_dir .*/run is gone: it was removed or renamed"):
        of_this_rank(run_dir, own.variables()).take()
    own.release()
    assert list(run_dir.iterdir()) == []


def test_a_post_mortem_does_not_bring_a_removed_run_folder_back(tmp_path: Path) -> None:
    folder = postmortem.folder_of(tmp_path / "run" / "logs" / "attempt_1")
    with pytest.raises(FileNotFoundError):
        postmortem.write_rank(folder, {}, "")
    with pytest.raises(FileNotFoundError):
        postmortem.mark_stall(folder, "update", 1.0)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    postmortem.write_rank(folder, {}, "")
    assert folder.is_dir()


def test_the_file_is_as_private_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        own = Ownership(tmp_path)
        own.take()
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o640
        own.release()
    finally:
        os.umask(before)
