"""What a post-mortem is told about the collectives of a process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from megatron_rl.runtime.collectives import recent
from megatron_rl.runtime.heartbeat import Heartbeat, RankFacts, heartbeats


def entry(name: str, number: int, created: int, retired: bool = True) -> dict[str, Any]:
    return {
        "profiling_name": name,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "time_created_ns": created,
        "process_group": ["1", "undefined"],
        "input_dtypes": ["Float"],
        "input_sizes": [[2]],
        "retired": retired,
    }


def recorder(*entries: dict[str, Any]) -> Callable[[], str]:
    return lambda: json.dumps({"pg_config": {"1": {"ranks": "[0, 1]"}}, "entries": entries})


def test_nccls_collectives_stand_among_the_others_in_order_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = entry("nccl:broadcast", 1, 5)
    gloo = recorder(entry("gloo:barrier", 7, 10), entry("gloo:all_gather", 8, 40), both)
    nccl = recorder(both, entry("nccl:all_reduce", 2, 20), entry("nccl:all_reduce", 3, 30, retired=False))
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", gloo)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", nccl, raising=False)
    found, waiting = recent(4)
    assert [line.partition(" of")[0] for line in found] == ["barrier 7", "all_reduce 2", "all_reduce 3", "all_gather 8"]
    assert waiting == "all_reduce 3 of [0, 1], float [2], waiting"
    assert len(recent(9)[0]) == 5


def test_a_heartbeat_has_room_for_a_collective_of_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    many = entry("gloo:all_reduce_coalesced", 1, 5, retired=False) | {
        "input_dtypes": ["Float"] * 999,
        "input_sizes": [[4096]] * 999,
    }
    trace = {"pg_config": {"1": {"ranks": str([*range(1024)])}}, "entries": [many]}
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: json.dumps(trace))
    [newest], waiting = recent(1)
    beats = Heartbeat()
    beats.facts = RankFacts(collective=newest, pending=waiting, host_gib=1.0)
    beats.attach(tmp_path, 7, 1024, None)
    assert heartbeats(tmp_path)[7]["pending"] == waiting
    beats.detach()
