"""A rank whose memory runs out says in which phase, what holds it, and what would help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.report.status import read_status
from megatron_rl.runtime import exit_codes

from .job import STOPPING, Job, processes_of


@pytest.mark.engine
def test_the_message_has_the_phase_the_table_and_the_knobs(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        *("sft.steps=0", f"algorithm.plugins=[{STOPPING}]", "rollout.cpu_cache_gib=0.1"),
        environment={"STOP": "update:1", "EXHAUST": "1"},
    )
    assert job.finish() == exit_codes.OUT_OF_MEMORY
    assert processes_of(job.run_dir) == []
    message = job.stderr.split("megatron-rl: out of memory ")[1]
    assert message.startswith("in `update` of RL step 1")
    assert "on rank 1 (node " in message.splitlines()[0]
    assert "can't allocate memory" in message
    shown = message.split("memory in GiB:\n")[1].split("what would")[0].splitlines()
    rows = [line.rsplit(maxsplit=1) for line in shown if line.strip()]
    table = {name.strip(): float(value) for name, value in rows}
    assert table["engine's KV cache"] == 0.1
    assert 0 < table["peak in generate, host"] < 10
    assert table["in use, host, this process"] > 0.05
    assert {"actor's weights", "gradients", "optimizer state", "peak in old_log_prob, host"} <= set(table)
    remedies = message.split("what costs least first:\n")[1]
    assert "actor.tokens_per_microbatch (now 256)" in remedies.splitlines()[0]
    assert "actor.recompute (now none)" in remedies
    assert "rollout.max_concurrent" not in remedies, "that is for another phase"
    assert "Traceback" not in job.stderr

    facts = json.loads((job.run_dir / "postmortem" / "attempt_1" / "rank_1.json").read_text())
    assert facts["phase"] == "update"
    assert "can't allocate memory" in facts["error"]
    assert facts["versions"]["torch"]
    status = read_status(job.run_dir)
    assert (status.state, status.code, status.why) == ("failed", exit_codes.OUT_OF_MEMORY, "memory ran out")
    environment = json.loads((job.run_dir / "logs" / "attempt_1" / "environment.json").read_text())
    assert environment["versions"]["torch"] == facts["versions"]["torch"]
    assert environment["command"][1] == "train"
    assert not {"uncommitted", "commit"} - environment["git"].keys() or not environment["git"]
