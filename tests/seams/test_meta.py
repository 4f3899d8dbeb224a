"""Tensors without content are counted as those with content are, also where an operator has seen their like before."""

from __future__ import annotations

import torch

from megatron_rl.seams.torch_meta import StorageCounter


def made_and_counted(device: str) -> tuple[list[object], list[int]]:
    """Shape, strides and dtype of what operators make, each of them twice; bytes after each kind of tensor, and the peak."""
    made, kept, count = list[object](), list[torch.Tensor](), list[int]()
    with StorageCounter(torch.device(device)) as counter:
        for size, dtype in ((4, torch.float32), (4, torch.bfloat16), (8, torch.float32)):
            for _ in range(2):
                x = torch.empty(size, 8, dtype=dtype, device=device)
                assert x.mul_(2) is x
                whole = x.to(torch.int64)
                new = [x + 1, x.t() + 1, x.t(), x.view(-1), x.sum(-1), x.sum(0, keepdim=True), *x.topk(2), whole]
                new += [whole + 1, whole + 1.0, torch.stack([x, x]), torch.stack([x, x, x])]
                x.t_()
                made += [(one.shape, one.stride(), one.dtype) for one in (x, *new)]
                kept += new
            count.append(counter.now)
        del kept[::2]
        return made, [*count, counter.now, counter.peak]


def test_an_operator_that_has_seen_such_tensors_makes_what_it_makes_of_real_ones() -> None:
    assert made_and_counted("meta") == made_and_counted("cpu")
