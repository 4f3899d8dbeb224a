"""What is applied to many tensors at once: Adam, norms, scaling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam in place on (gradients, parameters, first and second moments[, fp32 masters]); `mode` 1 decouples the decay.

    With masters the parameters are rounded copies of them.
    """
    if noop_flag.item():
        return
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for grad, parameter, first, second, *master in zip(*tensor_lists, strict=True):
        value = (master[0] if master else parameter).float()
        change = grad.float() if mode == 1 else grad.float() + weight_decay * value
        m = beta1 * first.float() + (1 - beta1) * change
        v = beta2 * second.float() + (1 - beta2) * change.square()
        update = (m / correction1) / ((v / correction2).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * value
        for target, new in ((first, m), (second, v), *((one, value - lr * update) for one in (parameter, *master))):
            target.copy_(new)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float
) -> None:
    """Second list = first list * scale; sets the flag where something is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        if not bool(torch.isfinite(source).all()):
            noop_flag.fill_(1)
        target.copy_(source.float() * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: Tensor
) -> None:
    """The same by a scale that is a tensor."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, float(scale))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors, fp32 [1], and where asked each one's."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm()[None], norms if per_tensor else norms.new_empty(0)
