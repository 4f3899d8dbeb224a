"""Variance of a minibatch's gradient, from those of its parts (shrinkage paper, Eq. 17-18).

Where every gradient element lies complete on one rank before the reduction over data-parallel ranks, the parts are their
micro-batches, and `GradientParts` measures them while the gradient is accumulated. A rank that has several needs one copy of
its gradients meanwhile, to tell a micro-batch's share from what was there before it; a rank that has one needs none.

With pipeline, context, sequence or expert parallelism a rank's gradients are shares of sums that only the reduction makes. A
part is then what all data-parallel ranks have at the same place in their order, and its gradient is computed in passes of its
own, reduced and measured like an update's: `Actor.update` does so, before the pass that it learns from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor

from megatron_rl.actor.packing import MicroBatch
from megatron_rl.algorithms.diagnostics import GradientVariance
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.seams.megatron import MAIN_GRADIENT, Chunk, before_gradients_are_summed

PartSize = Callable[[MicroBatch], float]
"""How much of the minibatch a micro-batch is: its rollouts, or its tokens under a token mean."""


def sizes_over_ranks(grid: ProcessGrid, micro_batches: Sequence[MicroBatch], size: PartSize) -> list[float]:
    """Returns the size of each part that all data-parallel ranks compute together, on every rank."""
    gathered = grid.all_gather(
        (grid.dp_rank, [size(micro) if micro.targets.numel() else 0.0 for micro in micro_batches])
    )
    by_replica = dict(gathered)  # its ranks have the same micro-batches
    return [sum(sizes) for sizes in zip(*by_replica.values(), strict=True)]


def of_parts(sizes: Sequence[float], count: int, squared_norm: Callable[[slice], float]) -> GradientVariance:
    """Measures parts of `count` micro-batches each, whose sizes are given; `squared_norm`: of a part's gradient."""
    variance = GradientVariance()
    for begin in range(0, len(sizes), count):
        part = slice(begin, begin + count)
        square = squared_norm(part)
        if size := sum(sizes[part]):
            variance.add(square, size)
    return variance


class GradientParts:
    """Squared norms of the micro-batches' gradients on this rank; one object per optimizer step.

    Args:
        ddp_chunks: Megatron's `DistributedDataParallel` modules.
        micro_batches: in the order in which they will be run.
        size: of each.
    """

    def __init__(self, ddp_chunks: Sequence[Chunk], micro_batches: Sequence[MicroBatch], size: PartSize) -> None:
        self._config = ddp_chunks[0].config
        self._parameters = [
            parameter
            for chunk in ddp_chunks
            for parameter in chunk.parameters()
            if parameter.requires_grad and param_is_not_tensor_parallel_duplicate(parameter)
        ]
        self._sizes = [size(micro) if micro.targets.numel() else 0.0 for micro in micro_batches]
        self._squares: list[float] = []
        self._started = 0
        self._before: list[Tensor] | None = None

    def start(self) -> None:
        """Called before each micro-batch's forward pass: what was accumulated until now belongs to its predecessor."""
        if self._started:
            self._measure(last=False)
        self._started += 1

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """While entered, the last micro-batch is measured just before the gradients are reduced over ranks."""
        with before_gradients_are_summed(self._config, lambda: self._measure(last=True)):
            yield

    @torch.no_grad()
    def _measure(self, last: bool) -> None:
        gradients: list[Tensor] = [getattr(parameter, MAIN_GRADIENT) for parameter in self._parameters]
        before: Sequence[Tensor | None] = self._before or [None] * len(gradients)
        squares = [
            (gradient if old is None else gradient - old).double().square().sum()
            for gradient, old in zip(gradients, before, strict=True)
        ]
        self._squares.append(float(torch.stack(squares).sum()) if squares else 0.0)
        if not last:
            if self._before is None:
                self._before = [torch.empty_like(gradient) for gradient in gradients]
            for old, gradient in zip(self._before, gradients, strict=True):
                old.copy_(gradient)

    def result(self, grid: ProcessGrid) -> GradientVariance:
        """Gathers the parts of all ranks, on every rank."""
        variance = GradientVariance()
        gathered = grid.all_gather((grid.dp_rank, self._sizes, self._squares))
        for dp_rank in range(grid.dp):
            shards = [(sizes, squares) for rank, sizes, squares in gathered if rank == dp_rank]
            for index, size in enumerate(shards[0][0]):
                if size:
                    variance.add(sum(squares[index] for _, squares in shards), size)
        return variance
