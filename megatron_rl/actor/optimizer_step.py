"""An optimizer step in its parts: old gradients away, the norm of the new ones, clipping, and the weights' change."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_rl.runtime import device
from megatron_rl.seams.megatron import Chunk, Optimizer, clip_gradients


def forget_gradients(ddp_chunks: Sequence[Chunk], optimizer: Optimizer) -> None:
    """Zeroes them, before the passes of an update."""
    with device.megatron():
        for chunk in ddp_chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()


def gradient_norm(optimizer: Optimizer) -> float:
    """Takes the norm over all ranks of gradients that are complete; it is not finite where some of them are not."""
    with device.megatron():
        found_inf = optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
    return math.nan if found_inf and math.isfinite(norm) else norm


def take_step(optimizer: Optimizer, rate: float, number: int) -> float:
    """Clips the gradients and changes the weights, at a learning rate. Returns the norm before.

    Args:
        number: of the step, for the message.

    Raises:
        FloatingPointError: if the gradient norm is not finite; nothing has been changed then.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    norm = gradient_norm(optimizer)
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"the gradient norm is {norm} at optimizer step {number}: a log-prob, a reward or a weight is not finite. The "
            "weights were not changed; the last checkpoint is good"
        )
    with device.megatron():
        clip_gradients(optimizer, norm)
        optimizer.step_with_ready_grads()  # `step` would prepare the gradients and take their norm again
    return norm
