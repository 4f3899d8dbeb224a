"""This process's rank, size and group along each parallel axis, for moving weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state as state


@dataclass(frozen=True)
class Axis:
    """One axis of the layout as one process sees it; `group` may be None where the size is 1."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelGroups:
    """The axes along which weights are split (tp, pp, ep, expert_tp) or repeated (dp, context parallelism included, and
    cp, its part of that).

    The default is a single process.
    """

    tp: Axis = Axis()
    pp: Axis = Axis()
    ep: Axis = Axis()
    expert_tp: Axis = Axis()
    dp: Axis = Axis()
    cp: Axis = Axis()

    @property
    def is_writer(self) -> bool:
        """True on the one process that writes files: the first along every axis."""
        return all(axis.rank == 0 for axis in (self.tp, self.pp, self.ep, self.expert_tp, self.dp))

    @classmethod
    def from_megatron(cls) -> ParallelGroups:
        """Read the layout from `megatron.core.parallel_state`, which must be initialised."""
        if not state.model_parallel_is_initialized():
            raise RuntimeError(
                "Megatron's model-parallel groups do not exist yet: call initialize_model_parallel first"
            )

        def axis(group: dist.ProcessGroup) -> Axis:
            return Axis(dist.get_rank(group), dist.get_world_size(group), group)

        return cls(
            tp=axis(state.get_tensor_model_parallel_group()),
            pp=axis(state.get_pipeline_model_parallel_group()),
            ep=axis(state.get_expert_model_parallel_group()),
            expert_tp=axis(state.get_expert_tensor_parallel_group()),
            dp=axis(state.get_data_parallel_group(with_context_parallel=True)),
            cp=axis(state.get_context_parallel_group()),
        )
