"""Peaks per phase are those of the phase; errors that mean "no memory" are known as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.runtime import memory_use as memory
from megatron_rl.runtime.memory_use import PhaseMemory, in_use, is_out_of_memory, oom_kills, table
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.trainer.rank import attempt


def test_a_peak_belongs_to_its_phase_and_to_the_one_around_it() -> None:
    memory = PhaseMemory()
    with memory("small"):
        pass
    with memory("outer"), memory("large"):
        torch.ones(2**28, dtype=torch.uint8)  # 256 MiB, gone at once
    with memory("after"):
        pass
    peaks = {phase: both["host"] for phase, both in memory.peaks.items()}
    assert peaks["large"] > peaks["small"] + 0.2
    assert peaks["outer"] >= peaks["large"]
    assert peaks["after"] < peaks["large"] - 0.2
    metrics = memory.metrics()
    assert metrics["memory/host_peak_gib"] >= metrics["memory/large/host_peak_gib"] == peaks["large"]
    assert memory.metrics().keys() == {"memory/host_peak_gib"}, "each step has its own"
    assert memory.highest["large"]["host"] == peaks["large"], "a post-mortem has them all"


def test_a_steps_peaks_are_not_those_of_a_stage_before_it() -> None:
    """The warm-up has phases of the same names."""
    timer = StepTimer()
    timer.start(1)
    with timer("update"):
        torch.ones(2**28, dtype=torch.uint8)
    before = timer.memory.highest["update"]["host"]
    timer.start(1)
    with timer("update"):
        pass
    metrics = timer.memory.metrics()
    assert metrics["memory/update/host_peak_gib"] < before - 0.2
    assert metrics["memory/host_peak_gib"] >= before


def refused_allocation() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


def test_what_torch_and_python_say_is_understood() -> None:
    assert is_out_of_memory(refused_allocation())
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    wrapped = RuntimeError("the engine failed")
    wrapped.__cause__ = MemoryError()
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("the prompt is too long"))


def test_the_table_is_aligned() -> None:
    lines = table({"weights": 1.5}, {"host": 10.0}, {"update": {"host": 2.25}}).splitlines()
    assert [line.split()[-1] for line in lines] == ["1.50", "10.00", "2.25"]
    assert len({len(line) for line in lines}) == 1


def test_kills_of_the_kernel_are_counted(tmp_path: Path) -> None:
    own, groups, machine = tmp_path / "cgroup", tmp_path / "fs", tmp_path / "vmstat"
    job = groups / "slurmstepd.scope" / "job_17"
    (job / "step_0" / "task_0").mkdir(parents=True)

    def kills() -> int:
        return oom_kills(own, groups, machine)

    assert kills() == 0
    own.write_text("0::/slurmstepd.scope/job_17/step_0/task_0\n")
    assert kills() == 0
    machine.write_text("nr_free_pages 7\noom_kill 9\n")
    assert kills() == 9, "the machine's, where no cgroup counts"
    events = "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"
    (job / "memory.events").write_text(events)  # of the job's, not of each level
    assert kills() == 2
    own.write_text("0::/\n")  # in a container
    (groups / "memory.events").write_text("oom_kill 5\n")
    assert kills() == 5


def test_kills_of_the_kernel_are_counted_in_version_1_of_cgroups(tmp_path: Path) -> None:
    own, task = tmp_path / "cgroup", tmp_path / "fs" / "memory" / "slurm" / "task_0"
    task.mkdir(parents=True)
    own.write_text("12:cpu,cpuacct:/slurm\n4:memory:/slurm/task_0\n1:name=systemd:/\n0::/\n")
    (task / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert oom_kills(own, tmp_path / "fs", tmp_path / "none") == 1


def test_a_thread_asks_for_its_processs_own_gpu_and_never_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (2**30, 2**33))
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: asked.append(device) or 2**29)
    assert in_use().keys() == {"host, this process"}, "before the process has used its GPU"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert in_use()["device, all processes"] == 7.0
    assert asked == [3, 3, 3]
    monkeypatch.setattr(memory, "in_use", lambda: pytest.fail("a heartbeat asks the device nothing"))
    assert attempt.rank_facts(False)["host_gib"] > 0
