"""Real processes, small ones: what they print, how they end, and that none is left."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_rl.launch.ranks import graces_in
from megatron_rl.runtime.attempts import free_port, new_attempt, rank_environment, shared_attempt
from tests.cli.launched import Launched, is_running, wait_until


@pytest.fixture(params=[None, "pass"], ids=["new", "forked"])
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator:
    launched: list[Launched] = []

    def launch(script: str, processes: int = 2, imports: str | None = request.param) -> Launched:
        launched.append(Launched(tmp_path, script, processes, imports))
        return launched[-1]

    yield launch
    for each in launched:
        each.process.kill()
        each.process.communicate()


def test_output_and_environment(launch, tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR"
    launched = launch(f"""
        print(*[os.environ[name] for name in "{names}".split()], end=" ")
        print(int(os.environ["MASTER_PORT"]) > 1024, os.getsid(0) == os.getpid())
        print("to the log", file=sys.stderr)
    """)
    code, out, _ = launched.end()
    assert (code, out) == (0, "0 0 2 2 127.0.0.1 True True\n")
    assert sorted((tmp_path / "rank_0.log").read_text().splitlines()) == [out.strip(), "to the log"]
    assert (tmp_path / "rank_1.log").read_text().splitlines()[-1].startswith(("1 1 2 2", "to the log"))


def test_a_failure_ends_the_others_and_is_told(launch) -> None:
    launched = launch("""
        here()
        if rank == 1:
            wait_for_rank_0()
            raise ValueError("what went wrong")
        time.sleep(60)
    """)
    pids = launched.pids()
    code, _, err = launched.end()
    assert code == 1
    assert "rank 1 failed first, with exit code 1; the end of" in err
    assert "rank_1.log:\n    Traceback (most recent call last)" in err
    assert "ValueError: what went wrong" in err
    assert not any(map(is_running, pids))


def test_a_ranks_own_message_is_what_is_shown(launch) -> None:
    _, _, err = launch("""
        print("Traceback (most recent call last):\\n  handled long ago", file=sys.stderr)
        print("megatron-rl: the disk is full\\nand more", file=sys.stderr)
        sys.exit(1)
    """, processes=1).end()  # fmt: skip
    message = err.strip().splitlines()
    assert message[0].startswith("rank 0 failed with exit code 1; the end of")
    assert message[1:] == ["    megatron-rl: the disk is full", "    and more"]


def test_the_exit_code_is_that_of_the_first_that_failed(launch) -> None:
    code, _, err = launch("""
        if rank == 1:
            sys.exit(7)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        time.sleep(60)
    """).end()
    assert code == 7
    assert "rank 1 failed first, with exit code 7" in err


def test_a_rank_that_is_killed(launch) -> None:
    launched = launch("""
        here()
        time.sleep(60)
    """)
    os.kill(launched.pids()[0], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 128 + signal.SIGKILL
    assert "rank 0 failed first, killed by SIGKILL, often a sign that memory ran out" in err


def test_a_killed_rank_is_named_with_the_phase_of_its_last_heartbeat(launch) -> None:
    launched = launch("""
        from megatron_rl.runtime.heartbeat import HEARTBEAT, Deadlines
        from megatron_rl.runtime.watchdog import Watchdog
        Watchdog(Path(os.environ["MEGATRON_RL_ATTEMPT"]), rank, 2, Deadlines(60.0, {})).start()
        HEARTBEAT.begin("RL", 0, 5)
        HEARTBEAT.step = 3
        HEARTBEAT.enter("update")
        here()
        time.sleep(60)
    """)
    os.kill(launched.pids()[1], signal.SIGKILL)
    _, _, err = launched.end()
    assert "rank 1 failed first, killed by SIGKILL in `update` of RL step 3, often a sign that memory ran out" in err


def test_what_the_pre_flight_found_is_shown_whichever_rank_ends_first(launch) -> None:
    code, _, err = launch("""
        if rank == 1:
            wait_for_rank_0()
            sys.exit(3)
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))  # noted, as a rank's is
        here()
        while not told:
            time.sleep(0.01)
        print("megatron-rl: n1 disks /dev/shm has 0 MiB free\\npre-flight: NOT FIT", file=sys.stderr)
        sys.exit(3)
    """).end()
    assert code == 3
    assert err == "n1 disks /dev/shm has 0 MiB free\npre-flight: NOT FIT\n"


def test_torchs_own_end_of_a_collective_that_waits_is_a_stall(launch, tmp_path: Path) -> None:
    code, _, err = launch("""
        print("[E901 ProcessGroupNCCL.cpp:688] [Rank 0] Watchdog caught collective operation timeout:", file=sys.stderr)
        sys.stderr.flush()
        os.abort()
    """, processes=1).end()  # fmt: skip
    assert code == 76
    assert "killed by SIGABRT" in err
    assert (tmp_path / "end").read_text().startswith("76 rank 0 on ")


def test_whoever_does_not_end_when_asked_is_killed_with_its_children(launch) -> None:
    launched = launch("""
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code])
        (folder / f"child_{rank}").write_text(str(child.pid))
        here()
        if rank == 1:
            wait_for_rank_0()
            sys.exit(3)
        time.sleep(60)
    """)
    pids = launched.pids() + launched.pids("child")
    code, _, _ = launched.end()
    assert code == 3
    wait_until(lambda: not any(map(is_running, pids)), 5)


def test_ctrl_c_stops_gracefully(launch, tmp_path: Path) -> None:
    launched = launch("""
        stop = []
        signal.signal(signal.SIGINT, lambda *_: stop.append(True))
        here()
        while not stop:
            time.sleep(0.01)
        time.sleep(1)  # longer than any grace: a graceful stop has no deadline
        here("ended")
    """)
    pids = launched.pids()
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 130
    assert "press Ctrl-C again" in err
    assert launched.pids("ended") == pids


def test_a_second_ctrl_c_kills(launch) -> None:
    launched = launch("""
        signal.signal(signal.SIGINT, lambda *_: here("asked"))
        here()
        while True:
            time.sleep(0.01)
    """)
    pids = launched.pids()
    launched.process.send_signal(signal.SIGINT)
    launched.pids("asked")
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 130
    assert "killed by SIGINT" in err
    assert not any(map(is_running, pids))


def test_ctrl_c_before_a_rank_is_ready_is_no_failure(launch) -> None:
    launched = launch("""
        here()
        time.sleep(60)
    """)
    launched.pids()
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 130
    assert "failed" not in err
    assert "Traceback" not in err


def test_sigterm_is_passed_on_and_then_enforced(launch, tmp_path: Path) -> None:
    launched = launch("""
        signal.signal(signal.SIGTERM, lambda *_: here("asked"))
        here()
        while True:
            time.sleep(0.01)
    """)
    pids = launched.pids()
    launched.process.terminate()
    code, _, _ = launched.end()
    assert code == 128 + signal.SIGTERM
    assert launched.pids("asked") == pids
    assert not any(map(is_running, pids))
    assert (tmp_path / "end").read_text().startswith("143 rank 0 on ")


def test_in_a_slurm_step_ranks_have_the_time_that_slurm_gives_them() -> None:
    assert graces_in({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}).stop == math.inf
    assert graces_in({"SLURM_JOB_ID": "7"}).stop == 30.0  # a shell of salloc, as on a laptop


def test_nobody_outlives_a_killed_launcher(launch) -> None:
    launched = launch("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        here()
        time.sleep(60)
    """)
    pids = launched.pids()
    launched.process.kill()
    wait_until(lambda: not any(map(is_running, pids)), 5)


def test_a_rank_that_hangs_after_rank_0_has_ended(launch) -> None:
    code, _, err = launch("""
        if rank == 1:
            time.sleep(60)
    """).end()
    assert code == 1
    assert "rank 1 did not end after rank 0 had" in err


def test_a_taken_port_is_tried_again(launch, tmp_path: Path) -> None:
    code, _, _ = launch("""
        with open(folder / f"tries_{rank}", "a") as file:
            file.write(os.environ["MASTER_PORT"] + "\\n")
        if rank == 0 and len((folder / "tries_0").read_text().split()) < 3:
            sys.exit("RuntimeError: The server socket has failed to listen, code: -98, name: EADDRINUSE")
    """).end()
    assert code == 0
    assert len((tmp_path / "tries_0").read_text().split()) == 3


def test_free_ports_are_free_and_out_of_the_systems_own_range() -> None:
    assert 20000 <= free_port() < 32000


def test_attempts_are_counted(tmp_path: Path) -> None:
    assert [new_attempt(tmp_path).name for _ in range(2)] == ["attempt_1", "attempt_2"]
    (tmp_path / "logs" / "attempt_10").mkdir()
    assert new_attempt(tmp_path).name == "attempt_11"


def test_under_srun_all_ranks_write_into_the_attempt_that_rank_0_has_made(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    with pytest.raises(TimeoutError, match="rank 3 gives up: rank 0 has not taken the run folder"):
        shared_attempt(tmp_path, step, rank=3, patience=0.3)
    assert list(tmp_path.iterdir()) == [], "before rank 0 has the folder, the others write nothing"
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(shared_attempt, tmp_path, step, rank, 60.0) for rank in (1, 2)]
        (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
        own = shared_attempt(tmp_path, step, rank=0, patience=0.0)
        assert own == tmp_path / "logs" / "attempt_2"
        assert [other.result() for other in others] == [own, own]
    assert shared_attempt(tmp_path, {}, rank=1, patience=0.0) is None


def test_tests_compute_without_torchs_compiler_as_ranks_on_a_cpu_do(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.environ.get("TORCH_COMPILE_DISABLE")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    assert here == rank_environment(gpus=0)["TORCH_COMPILE_DISABLE"]


def test_what_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PYTHONUTF8", "0")
    assert rank_environment(gpus=0)["TORCH_COMPILE_DISABLE"] == "1"
    assert rank_environment(gpus=0)["PYTHONUTF8"] == "1", "torch and vLLM read their own files as UTF-8 or not at all"
    assert "OMP_NUM_THREADS" not in rank_environment(gpus=0)
    assert "TORCH_COMPILE_DISABLE" not in rank_environment(gpus=1)


def test_threads_that_wait_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's OpenMP reads it: a rank's own words on its settings."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert rank_environment(gpus=0)["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in rank_environment(gpus=1)

    def spins() -> str:
        environment = {**os.environ, **rank_environment(gpus=0), "OMP_DISPLAY_ENV": "verbose", "OMP_NUM_THREADS": "2"}
        library = next(Path(sys.prefix).glob("lib/python*/site-packages/torch/lib/libgomp*"))
        command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL('{library}')"]
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
        return shown.partition("GOMP_SPINCOUNT = '")[2].partition("'")[0]

    assert spins() == "0"
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    assert spins() == "77"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert int(spins()) > 10**6


def test_vllms_packages_compile_nothing_in_the_background_on_gpus() -> None:
    """Threads and processes of their imports keep ranks from being forks (`make check-gpu-set`, step forks)."""
    assert rank_environment(gpus=8)["HUMMING_DISABLE_PARALLEL_BUILD"] == "1"
    assert "HUMMING_DISABLE_PARALLEL_BUILD" not in rank_environment(gpus=0)
