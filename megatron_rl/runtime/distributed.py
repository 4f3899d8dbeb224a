"""Process groups: Megatron's model-parallel grid, and a gloo group for objects that live on the host."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.actor import ParallelConfig
from megatron_rl.runtime import device, nvml, rendezvous
from megatron_rl.seams import torch_dist

T = TypeVar("T")


@dataclass(frozen=True)
class EngineGroup:
    """The consecutive ranks that are one engine, `rollout.tensor_parallel` of them."""

    index: int = 0  # of this process's engine
    count: int = 1  # engines of the run
    size: int = 1  # ranks of an engine
    rank: int = 0  # of this process in its engine
    group: dist.ProcessGroup | None = None  # gloo, of its ranks; None: it has one

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def broadcast(self, item: T) -> T:
        """The leader's item, on every rank of the engine: what only one of them may ask for."""
        box = [item]
        if self.group is not None:
            dist.broadcast_object_list(box, src=self.index * self.size, group=self.group)
        return box[0]


@dataclass(frozen=True)
class ProcessGrid:
    """This process's ranks and the sizes of the parallel dimensions, and the groups used outside Megatron-Core."""

    rank: int
    world: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int
    cp: int
    cp_rank: int
    host_group: dist.ProcessGroup | None  # gloo, all ranks: Python objects and numpy arrays
    replicas: tuple[tuple[int, ...], ...] = ((0,),)  # ranks of every data-parallel replica, by `dp_rank`
    engine: EngineGroup = EngineGroup()
    # For what few ranks tell each other; None where the world was there before `initialize`.
    store: dist.Store | None = None
    # Of tensors on the device; None: torch's world, which is this grid's.
    device_group: dist.ProcessGroup | None = None
    # With split placement: the ranks of both roles, those that learn first. This grid is then of one role.
    link: ProcessGrid | None = None
    learners: int = 0  # of `link`'s ranks; 0: every process has both roles

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def everyone(self) -> ProcessGrid:
        """The ranks of all processes of the run."""
        return self.link or self

    @property
    def generates_only(self) -> bool:
        return self.link is not None and self.link.rank >= self.learners

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def is_loss_rank(self) -> bool:
        """One rank per data-parallel replica: the one whose loss metrics count."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    def all_gather(self, item: T) -> list[T]:
        """`item` of every rank, in rank order."""
        out = [item] * self.world
        if self.world > 1:
            dist.all_gather_object(out, item, group=self.host_group)
        return out

    def gather(self, item: T) -> list[T]:
        """`item` of every rank, in rank order, on rank 0; [] on the others."""
        out = [item] * self.world if self.is_main else None
        if self.world > 1:
            dist.gather_object(item, out, group=self.host_group)
        return out or []

    def broadcast(self, item: T, source: int = 0) -> T:
        """The item of a rank."""
        box = [item]
        dist.broadcast_object_list(box, src=source, group=self.host_group)
        return box[0]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """`data` of every rank, in rank order; lengths may differ."""
        sizes = self._gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        return [part[:size].numpy().tobytes() for part, size in zip(self._gather(padded), sizes, strict=True)]

    def _gather(self, item: torch.Tensor) -> torch.Tensor:
        """[world, ...]: every rank's tensor, all of one shape and dtype, on the host.

        In ceil(log2(world)) rounds, in which each rank passes on all that it has (Bruck et al., 1997, doi:10.1109/71.642949).
        gloo's own is a ring of world - 1 rounds; where a host's cores are fewer than its ranks, each round waits for all of
        them to have run.
        """
        table, have = torch.empty((self.world, *item.shape), dtype=item.dtype), 1  # from this rank on
        table[0] = item
        while have < self.world:
            count = min(have, self.world - have)
            works = [
                dist.irecv(table[have : have + count], (self.rank + have) % self.world, self.host_group),
                dist.isend(table[:count], (self.rank - have) % self.world, self.host_group),
            ]
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait()
            have += count
        return table.roll(self.rank, 0)

    def sum_array(self, array: np.ndarray) -> None:
        """Sums every rank's array in place, all of one shape and dtype. Exact where all ranks but one have zeros."""
        if self.world > 1:
            dist.all_reduce(torch.from_numpy(array), group=self.host_group)

    def gather_rows(self, row: np.ndarray) -> np.ndarray:
        """[world, ...]: every rank's array, all of one shape and dtype."""
        table = np.zeros((self.world, *row.shape), dtype=row.dtype)
        table[self.rank] = row
        self.sum_array(table)
        return table

    def barrier(self) -> None:
        dist.barrier(group=self.host_group)


ALONE = ProcessGrid(
    rank=0, world=1, tp=1, tp_rank=0, pp=1, pp_rank=0, dp=1, dp_rank=0, cp=1, cp_rank=0, host_group=None
)
"""A process without others, and without collectives."""


def initialize(
    parallel: ParallelConfig,
    timeout_minutes: float,
    gpu_timeout_minutes: float | None = None,
    fp32_scales: bool = True,
    engine_ranks: int = 1,
    generators: int = 0,
) -> ProcessGrid:
    """Joins the world described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT and lays Megatron's grid over it.

    With `generators`, the last so many processes only generate: each of the two roles is torch's world to its own processes
    from here on, and Megatron-Core and vLLM know nothing of the other. What joins them is `ProcessGrid.link`.

    Args:
        timeout_minutes: after which a collective raises an error.
        gpu_timeout_minutes: after which torch ends a process whose NCCL collective waits; None: the same.
        fp32_scales: of blockwise FP8 on Hopper, as the engine has them; else powers of two. Not for parameters that are
            themselves in FP8: what they stand for is saved and sent in bf16, which is exact with powers of two only.
        engine_ranks: of every engine; see `EngineGroup`.
        generators: processes that only generate; 0: every one does both.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    minutes = timeout_minutes
    if device.has_gpu():
        minutes = gpu_timeout_minutes or timeout_minutes
        torch.cuda.set_device(device.index())
    if fp32_scales and device.is_hopper():
        # Before Megatron-Core imports Transformer Engine, whose default rounds scales up to powers of two.
        os.environ.setdefault(nvml.FP32_SCALES, "1")
    from megatron.core import parallel_state

    store = _join(rank, world, timedelta(minutes=minutes))
    link, learners = None, world - generators
    if generators:
        link = _enter_role(rank, world, learners, timedelta(minutes=minutes))
        rank, world = dist.get_rank(), dist.get_world_size()
    shared = store and dist.PrefixStore("megatron_rl", store)
    if link is not None and link.rank >= learners:
        host_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        engine = _engine_group(rank, world, engine_ranks, timeout_minutes)
        in_role = replace(
            link, rank=rank, world=world, dp=world, dp_rank=rank, host_group=host_group, device_group=None
        )
        return replace(in_role, engine=engine, store=shared, link=link, learners=learners)
    with device.megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor,
            distributed_timeout_minutes=max(1, int(minutes)),
            create_gloo_process_groups=True,
        )
    host_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
    dp_ranks = [0] * world
    dist.all_gather_object(dp_ranks, parallel_state.get_data_parallel_rank(), group=host_group)
    dp = parallel_state.get_data_parallel_world_size()
    return ProcessGrid(
        rank=rank,
        world=world,
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp=dp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        host_group=host_group,
        engine=_engine_group(rank, world, engine_ranks if link is None else 1, timeout_minutes),
        store=shared,
        replicas=tuple(tuple(r for r in range(world) if dp_ranks[r] == replica) for replica in range(dp)),
        link=link,
        learners=learners if generators else 0,
    )


def _join(rank: int, world: int, timeout: timedelta) -> dist.Store | None:
    """Joins torch's world; None where it was there before."""
    torch_dist.share_device()
    if dist.is_initialized():
        return None
    store = rendezvous.store(timeout)
    default = dist.PrefixStore("default_pg", store)
    # Without a `device_id`, with which torch splits NCCL's groups from this one. torch 2.13 then has the ranks outside of
    # a new group take part in a split also where the group is gloo's, as some of Megatron's and vLLM's are; its members
    # do not, and the others would wait for ever (distributed_c10d, `_new_process_group_helper`).
    dist.init_process_group(device.backend(), store=default, rank=rank, world_size=world, timeout=timeout)
    return store


def _enter_role(rank: int, world: int, learners: int, timeout: timedelta) -> ProcessGrid:
    """Makes the processes of this one's role torch's world. Returns the grid of all, in which one role waits for the other:
    the watchdog has the deadline of that, and a process that ends closes its connections."""
    host = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    tensors = dist.new_group(backend=device.backend(), timeout=timedelta(days=30))
    of_roles = [dist.new_group(ranks, timeout) for ranks in (range(learners), range(learners, world))]
    torch_dist.make_world(of_roles[rank >= learners])
    return replace(ALONE, rank=rank, world=world, dp=world, dp_rank=rank, host_group=host, device_group=tensors)


def _engine_group(rank: int, world: int, size: int, timeout_minutes: float) -> EngineGroup:
    """Every rank makes the groups of all engines."""
    engines = [list(range(world)[first : first + size]) for first in range(0, world, size)]
    groups: list[dist.ProcessGroup | None] = [None] * len(engines)
    if size > 1:
        groups = [dist.new_group(ranks, timedelta(minutes=timeout_minutes), "gloo") for ranks in engines]
    return EngineGroup(rank // size, len(engines), size, rank % size, groups[rank // size])


def shutdown() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
