"""Ranks that are forks of one process: what the launcher's other tests (test_spawn.py, in both ways) do not ask."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.launch.ranks import imports_of
from megatron_rl.runtime import fork_server
from megatron_rl.trainer.rank import imports, imports_with_gym
from tests.cli.launched import Launched, is_running, wait_until

HERE = """
from pathlib import Path
import os, time
Path("importing").write_text(str(os.getpid()))
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator:
    launched: list[Launched] = []

    def launch(script: str, imports: str, processes: int = 2) -> Launched:
        launched.append(Launched(tmp_path, script, processes, imports))
        return launched[-1]

    yield launch
    for each in launched:
        each.process.kill()
        each.process.communicate()


def test_imports_are_done_once_and_a_fork_is_like_a_new_process(launch, tmp_path: Path) -> None:
    imports = """
        import numpy, os, random
        assert os.environ["OPENBLAS_NUM_THREADS"] == "1", "a pool of its threads would be in the way"
        with open("imports", "a") as file:
            file.write("once ")
        os.environ["SET_BY_IMPORTS"] = "kept"
    """
    launched = launch("""
        import ctypes, numpy, random
        print(sys.argv[1:] == [os.getcwd()], os.getsid(0) == os.getpid(), os.readlink("/proc/self/fd/0"), end=" ")
        print(Path("/proc/self/comm").read_text().strip(), os.environ["RANK"], os.environ["LOCAL_RANK"], end=" ")
        print(os.environ["SET_BY_IMPORTS"], os.environ.get("OPENBLAS_NUM_THREADS"), end=" ")
        opened = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) > 2]
        print([path.name for path in opened if path.exists()], end=" ")
        signals = {signal.SIGINT: signal.default_int_handler, signal.SIGUSR1: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
        print(all(signal.getsignal(number) == handler for number, handler in signals.items()), end=" ")
        print(os.getppid() == int((folder / "launcher").read_text()))
        (folder / f"random_{rank}").write_text(f"{random.random()} {numpy.random.random()}")
        (folder / f"hash_{rank}").write_text(str(hash("a")))
    """, imports)  # fmt: skip
    (tmp_path / "launcher").write_text(str(launched.process.pid))
    code, out, err = launched.end()
    assert code == 0, err
    assert (tmp_path / "imports").read_text() == "once "
    assert out.strip() == "True True /dev/null rank 0 0 0 kept None [] True True"
    assert "True True /dev/null rank 1 1 1 kept None [] True True" in (tmp_path / "rank_1.log").read_text()
    drawn = [(tmp_path / f"random_{rank}").read_text().split() for rank in range(2)]
    assert all(a != b for a, b in zip(*drawn, strict=True)), drawn
    assert (tmp_path / "hash_0").read_text() == (tmp_path / "hash_1").read_text()


@pytest.mark.parametrize(
    ("imports", "why"),
    {
        "a thread": (
            'import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()',
            "the imports have left threads, which a fork would lack",
        ),
        "a process": (
            'import subprocess\nsubprocess.Popen(["sleep", "5"])',
            "the imports have started processes, which forks would share",
        ),
        "a driver": (
            "import os, sys\nparent = os.getpid()\n"
            "sys.modules['__main__']._start_driver = lambda: os.getpid() == parent",
            "CUDA's driver does not start in a fork",
        ),
    }.values(),
    ids=("a thread", "a process", "a driver"),
)  # fmt: skip
def test_where_a_fork_would_not_be_like_a_new_process_each_rank_is_one_and_it_is_said(
    launch, imports: str, why: str
) -> None:
    code, out, err = launch('print("imported" in sys.modules, os.environ["RANK"])', imports).end()
    assert (code, out) == (0, "False 0\n")
    assert f"each rank imports for itself, which takes longer: {why}" in err


def test_imports_that_fail_are_the_first_ranks_failure(launch) -> None:
    code, _, err = launch("here()", 'raise ImportError("libfoo.so.3: cannot open shared object file")').end()
    assert code == 1
    assert "rank 0 failed with exit code 1; the end of" in err
    assert "ImportError: libfoo.so.3: cannot open shared object file" in err


@pytest.mark.parametrize(
    ("number", "expected", "said"),
    [
        (signal.SIGINT, 130, "stopped by SIGINT"),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGUSR1, 75, ""),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_told_to_end_while_it_imports(launch, tmp_path: Path, number: int, expected: int, said: str) -> None:
    launched = launch("here()", HERE + "time.sleep(60)\n")
    importing = tmp_path / "importing"
    wait_until(lambda: importing.exists() and importing.read_text() != "")
    pid = int(importing.read_text())
    begin = time.monotonic()
    launched.process.send_signal(number)
    code, _, err = launched.end()
    assert code == expected
    assert said in err
    assert "failed" not in err
    wait_until(lambda: not is_running(pid), 5)
    assert time.monotonic() - begin < 20
    assert not list(tmp_path.glob("pid_*"))


def test_a_signal_that_comes_when_all_is_imported_reaches_the_ranks(launch, tmp_path: Path) -> None:
    launched = launch(
        """
        here("begun")
        time.sleep(60)
        """,
        HERE + "from megatron_rl.runtime import stop\nstop.hold_back()\ntime.sleep(2)\n",
    )
    wait_until((tmp_path / "importing").exists)
    launched.process.terminate()
    code, _, err = launched.end()
    assert code == 143, err
    assert "failed" not in err


def test_a_killed_import_and_a_crash_in_a_rank_are_told(launch, tmp_path: Path) -> None:
    launched = launch("here()", HERE + "time.sleep(60)\n")
    wait_until((tmp_path / "importing").exists)
    os.kill(int((tmp_path / "importing").read_text()), signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 137
    assert "rank 0 failed killed by SIGKILL" in err
    code, _, err = launch("import ctypes\nif rank == 1: ctypes.string_at(0)\ntime.sleep(20)", "pass").end()
    assert code == 139
    assert "rank 1 failed first, killed by SIGSEGV" in err


def test_ranks_do_not_begin_without_their_launcher(tmp_path: Path) -> None:
    """It dies when they are there, before it has heard of them."""
    read, write = os.pipe()
    os.close(write)
    child = os.fork()
    if child == 0:
        fork_server._become(fork_server.RankWorld({"RANK": "0"}, 1, 2), set(), os.getpid(), read)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    os.close(read)


@pytest.mark.parametrize(
    ("recipe", "module"), [("cpu/quickstart.yaml", imports_with_gym), ("cpu/python_maths.yaml", imports)]
)
def test_what_only_some_recipes_need_is_imported_for_those(recipe: str, module: ModuleType) -> None:
    assert imports_of(load_recipe(Path("recipes") / recipe)) == module.__name__
    assert callable(module.import_all)
