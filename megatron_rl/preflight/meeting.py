"""The ranks of a pre-flight find each other here, and learn which of them has fallen behind."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_rl.runtime import device, rendezvous

T = TypeVar("T")


class RendezvousError(RuntimeError):
    """Ranks did not find each other in time; the message names those that are missing, or the address."""


@dataclass
class MetRanks:
    """The ranks of a pre-flight, once all have come: `storage.Ranks` over gloo."""

    rank: int
    world: int
    group: dist.ProcessGroup  # gloo, all ranks
    store: dist.Store  # where every rank writes how often it has met the others
    meetings: int = 0
    device_group: dist.ProcessGroup | None = None  # torch's world

    def all_gather(self, item: T) -> list[T]:
        out = [item] * self.world
        with self._meeting():
            dist.all_gather_object(out, item, group=self.group)
        return out

    def barrier(self) -> None:
        with self._meeting():
            dist.barrier(group=self.group)

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Raises:
        RendezvousError: naming the ranks that did not arrive in time.
        """
        self.meetings += 1
        self.store.set(f"preflight/met/{self.meetings}/{self.rank}", "")
        try:
            yield
        except RuntimeError as error:
            try:
                met = [self.store.check([f"preflight/met/{self.meetings}/{rank}"]) for rank in range(self.world)]
                hosts = {
                    rank: self.store.get(f"preflight/{rank}").decode() for rank, came in enumerate(met) if not came
                }
            except RuntimeError:  # rank 0 served it
                hosts = {0: os.environ["MASTER_ADDR"]}
            behind = ", ".join(f"rank {rank} on {host}" for rank, host in hosts.items()) or "no rank"
            raise RendezvousError(
                f"node {socket.gethostname()}: {behind} has fallen behind or ended: {str(error).splitlines()[0]}"
            ) from None


def meet(minutes: float) -> MetRanks:
    """Joins the world described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        RendezvousError: on rank 0, naming the ranks that are missing; on the others, naming the address that does not answer.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience, host = timedelta(minutes=minutes), socket.gethostname()
    # torchrun serves the store itself.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = rendezvous.store(patience, wait=False)
    except (RuntimeError, OSError) as error:
        what = f"cannot listen at {address}:{port}" if serves else f"cannot reach rank 0 at {address}:{port}"
        raise RendezvousError(f"node {host}: {what} within {minutes:g} min: {str(error).splitlines()[0]}") from None
    store.set(f"preflight/{rank}", host)
    until = time.monotonic() + patience.total_seconds()
    while missing := [r for r in range(world) if not store.check([f"preflight/{r}"])]:
        if time.monotonic() > until:
            came = sorted({store.get(f"preflight/{r}").decode() for r in range(world) if r not in missing})
            raise RendezvousError(
                f"node {host}: {len(missing)} of {world} ranks have not come within {minutes:g} min: "
                f"{', '.join(map(str, missing))}; ranks came from: {', '.join(came)}"
            )
        time.sleep(0.1)
    if device.has_gpu():
        torch.cuda.set_device(device.index())
    dist.init_process_group(
        device.backend(), store=dist.PrefixStore("pg", store), rank=rank, world_size=world, timeout=patience
    )
    return MetRanks(rank, world, dist.new_group(backend="gloo", timeout=patience), store)
