"""Ranks that wait for each other in vain say for whom, and where nothing gets through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.preflight import across_ranks
from megatron_rl.preflight.meeting import MetRanks, RendezvousError


def gives_up(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("[../gloo/transport/tcp/buffer.cc:72] Timed out waiting 180000ms for recv operation\nmore")


def test_whoever_falls_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank, host in enumerate(("gpu01", "gpu01", "gpu02", "gpu02")):
        store.set(f"preflight/{rank}", host)
    for key in (
        "1/1",
        "1/2",
        "1/3",
        "2/1",
        "2/3",
    ):  # who has come to the first meeting and to the second, besides rank 0
        store.set(f"preflight/met/{key}", "")
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(dist, "all_gather_object", gives_up)
    ranks = MetRanks(0, 4, None, store)
    ranks.barrier()
    with pytest.raises(
        RendezvousError, match=r": rank 2 on gpu02 has fallen behind or ended: .*Timed out waiting 180000ms"
    ):
        ranks.all_gather(1)


def test_the_link_that_lets_nothing_through_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "isend", lambda data, to, group: SimpleNamespace(wait=gives_up))
    ranks: Any = SimpleNamespace(rank=0, world=2, barrier=lambda: None, device_group=None)
    with pytest.raises(ConnectionError, match=r"^gpu01 -> gpu02: a message .* does not get through within 90 s"):
        across_ranks._links(ranks, ["gpu01", "gpu02"], {})
    ranks.world = 1024
    with pytest.raises(ConnectionError, match="within 218 s"):
        across_ranks._links(ranks, ["gpu01", "gpu02"], {})
