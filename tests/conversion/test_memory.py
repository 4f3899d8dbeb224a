"""How much memory a comparison of logits may take: what the machine has, and what the job may use of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.checkpoint.convert.verify import available_memory

GB = 10**9
LIMITS = {
    # where: control groups as /proc/self/cgroup lists them, files below /sys/fs/cgroup
    "version 2": ("0::/slurm/job_7/step_0", {"slurm/job_7": ("memory.max", "memory.current", "inactive_file")}),
    "a container": ("0::/", {"": ("memory.max", "memory.current", "inactive_file")}),
    "version 1": (
        "9:name=systemd:/\n4:cpu,memory:/docker/7",
        {"memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")},
    ),
}


@pytest.mark.parametrize("where", LIMITS)
def test_a_jobs_limit_counts(tmp_path: Path, where: str) -> None:
    groups, files = LIMITS[where]
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups + "\n")
    (proc / "meminfo").write_text(f"MemTotal: {3 * 10**9} kB\nMemAvailable: {2 * 10**9} kB\n")
    assert available_memory(proc, cgroups) == 2 * 10**9 * 1024
    for folder, (limit, usage, cache) in files.items():
        (cgroups / folder).mkdir(parents=True, exist_ok=True)
        (cgroups / folder / limit).write_text("max\n" if "max" in limit else f"{2**63 - 4096}\n")
        (cgroups / folder / usage).write_text(f"{30 * GB}\n")
        (cgroups / folder / "memory.stat").write_text(f"anon {20 * GB}\n{cache} {10 * GB}\n")
        assert available_memory(proc, cgroups) == 2 * 10**9 * 1024
        (cgroups / folder / limit).write_text(f"{64 * GB}\n")
    assert available_memory(proc, cgroups) == 44 * GB
