"""AdamW with its state in the host's memory, computed by the host's processors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_rl.runtime import device
from megatron_rl.runtime.calls import processors
from megatron_rl.seams.megatron_hybrid import STATE, HostOptimizer

_BLOCK = 2**24  # elements of a weight that are on their way at a time


@dataclass
class _Block:
    """A part of a weight, its gradient, and its state on the host; all 1-D, of equal length."""

    options: dict[str, Any]  # of its group
    step: int  # the number of this one, from 1
    weight: Tensor
    gradient: Tensor  # fp32
    state: list[Tensor]  # fp32: master, first and second moment


class HostAdam(HostOptimizer):
    """Gradients come to the host and new weights leave it block by block, through two buffers of pinned memory, while another
    block is computed; the device keeps nothing of the state.

    The arithmetic is that of `torch.optim.AdamW` with `fused=True` on fp32 masters, whatever the blocks.
    """

    _buffers: tuple[Tensor, Tensor] | None = None  # fp32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        blocks = list(self._blocks())
        buffers = self._staging(max((len(block.weight) for block in blocks), default=0))
        arrived = _fetch(blocks[0], buffers[0]) if blocks else None
        with _all_processors():
            for number, block in enumerate(blocks):
                buffer = buffers[number % 2][: len(block.weight)]
                if arrived is not None:
                    arrived.synchronize()
                if number + 1 < len(blocks):  # the other buffer has been sent by then: copies are in order
                    arrived = _fetch(blocks[number + 1], buffers[1 - number % 2])
                _update(block, buffer)
                new = buffer.view(block.weight.dtype)[: len(block.weight)]  # in the gradient's place
                block.weight.copy_(new.copy_(block.state[0]), non_blocking=True)

    def _blocks(self) -> Iterator[_Block]:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.decoupled_grad is None:
                    continue
                state = self.state[weight]
                state["step"] = state["step"] + 1
                tensors = [weight.detach(), weight.decoupled_grad, *(state[name] for name in STATE)]
                for parts in zip(*(tensor.view(-1).split(_BLOCK) for tensor in tensors), strict=True):
                    yield _Block(group, int(state["step"]), parts[0], parts[1], list(parts[2:]))

    def _staging(self, elements: int) -> tuple[Tensor, Tensor]:
        """Host memory for so many fp32 numbers, twice."""
        if self._buffers is None or len(self._buffers[0]) < elements:
            one, two = (device.host_buffer(4 * elements).view(torch.float32) for _ in range(2))
            self._buffers = one, two
        return self._buffers


def _fetch(block: _Block, buffer: Tensor) -> torch.cuda.Event | None:
    """Starts to copy the gradient; what is returned tells when it is there, None that it is."""
    buffer[: len(block.gradient)].copy_(block.gradient, non_blocking=True)
    return torch.cuda.current_stream().record_event() if device.has_gpu() else None


def _update(block: _Block, gradient: Tensor) -> None:
    """AdamW in place on the state."""
    master, first, second = block.state
    options, (beta1, beta2) = block.options, block.options["betas"]
    adamw(
        [master],
        [gradient],
        [first],
        [second],
        [],
        [torch.tensor(block.step - 1.0)],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )


@contextlib.contextmanager
def _all_processors() -> Iterator[None]:
    """torchrun leaves each process one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(processors())
    try:
        yield
    finally:
        torch.set_num_threads(before)
