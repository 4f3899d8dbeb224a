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

_PIECE = 2**24  # elements of a weight that are on their way at a time


@dataclass
class _Piece:
    """A part of a weight, its gradient, and its state on the host; all 1-D, of equal length."""

    options: dict[str, Any]  # of its group
    step: int  # the number of this one, from 1
    weight: Tensor
    gradient: Tensor  # fp32
    state: list[Tensor]  # fp32: master, first and second moment


class HostAdam(HostOptimizer):
    """Gradients come to the host and new weights leave it piece by piece, through two buffers of pinned memory, while another
    piece is computed; the device keeps nothing of the state.

    The arithmetic is that of `torch.optim.AdamW` with `fused=True` on fp32 masters, whatever the pieces.
    """

    _buffers: tuple[Tensor, Tensor] | None = None  # fp32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pieces = list(self._pieces())
        buffers = self._staging(max((len(piece.weight) for piece in pieces), default=0))
        arrived = _fetch(pieces[0], buffers[0]) if pieces else None
        with _all_processors():
            for number, piece in enumerate(pieces):
                buffer = buffers[number % 2][: len(piece.weight)]
                if arrived is not None:
                    arrived.synchronize()
                if number + 1 < len(pieces):  # the other buffer has been sent by then: copies are in order
                    arrived = _fetch(pieces[number + 1], buffers[1 - number % 2])
                _update(piece, buffer)
                new = buffer.view(piece.weight.dtype)[: len(piece.weight)]  # in the gradient's place
                piece.weight.copy_(new.copy_(piece.state[0]), non_blocking=True)

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.decoupled_grad is None:
                    continue
                state = self.state[weight]
                state["step"] = state["step"] + 1
                tensors = [weight.detach(), weight.decoupled_grad, *(state[name] for name in STATE)]
                for parts in zip(*(tensor.view(-1).split(_PIECE) for tensor in tensors), strict=True):
                    yield _Piece(group, int(state["step"]), parts[0], parts[1], list(parts[2:]))

    def _staging(self, elements: int) -> tuple[Tensor, Tensor]:
        """Host memory for so many fp32 numbers, twice."""
        if self._buffers is None or len(self._buffers[0]) < elements:
            one, two = (device.host_buffer(4 * elements).view(torch.float32) for _ in range(2))
            self._buffers = one, two
        return self._buffers


def _fetch(piece: _Piece, buffer: Tensor) -> torch.cuda.Event | None:
    """Starts to copy the gradient; what is returned tells when it is there, None that it is."""
    buffer[: len(piece.gradient)].copy_(piece.gradient, non_blocking=True)
    return torch.cuda.current_stream().record_event() if device.has_gpu() else None


def _update(piece: _Piece, gradient: Tensor) -> None:
    """AdamW in place on the state."""
    master, first, second = piece.state
    options, (beta1, beta2) = piece.options, piece.options["betas"]
    adamw(
        [master],
        [gradient],
        [first],
        [second],
        [],
        [torch.tensor(piece.step - 1.0)],
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
