"""Variance of a minibatch's gradient, measured while it is accumulated (shrinkage paper, Eq. 17-18).

The parts are the micro-batches of all data-parallel ranks. A rank that has several needs one copy of its gradients while it
measures, to tell a micro-batch's share from what was there before it; a rank that has one needs none. Restricted to layouts
in which every gradient element lies complete on one rank before the reduction: no pipeline, sequence or expert parallelism.
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


class GradientParts:
    """Squared norms of the micro-batches' gradients on this rank; one object per optimizer step.

    Args:
        ddp_chunks: Megatron's `DistributedDataParallel` modules.
        micro_batches: in the order in which they will be run.
        size: how much of the minibatch a micro-batch is: its rollouts, or its tokens under a token mean.
    """

    def __init__(
        self, ddp_chunks: Sequence[Chunk], micro_batches: Sequence[MicroBatch], size: Callable[[MicroBatch], float]
    ) -> None:
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

    def result(self, grid: ProcessGrid, grad_norm: float) -> tuple[float | None, int]:
        """Over all ranks: trace of the covariance of the minibatch's gradient (None with one part), and the parts.

        Args:
            grad_norm: norm of the minibatch's gradient, before clipping.
        """
        variance = GradientVariance()
        gathered = grid.all_gather((grid.dp_rank, self._sizes, self._squares))
        for dp_rank in range(grid.dp):
            shards = [(sizes, squares) for rank, sizes, squares in gathered if rank == dp_rank]
            for index, size in enumerate(shards[0][0]):
                if size:
                    variance.add(sum(squares[index] for _, squares in shards), size)
        return (variance.of_sum(grad_norm**2) if variance.count > 1 else None), variance.count
