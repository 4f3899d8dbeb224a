"""Rotation of packed sequences on a CPU: all at once, to the bits of Megatron-Core's one after the other."""

from __future__ import annotations

import inspect

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron_rl.seams import megatron_cpu
from megatron_rl.seams.megatron_cpu import MegatronOnCpu


class OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("lengths", [[1, 7, 5, 13], [9], [3, 3]])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 8])  # all of a head, or a part of it
def test_rotation_at_once_is_rotation_one_by_one(lengths: list[int], interleaved: bool, width: int) -> None:
    torch.manual_seed(0)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    freqs = torch.randn(20, 1, 1, width)
    made = [torch.randn(sum(lengths), 2, 16, requires_grad=True) for _ in range(2)]
    made[1].data.copy_(made[0].data)
    results = []
    for t in made:
        with MegatronOnCpu() if t is made[0] else torch.enable_grad():
            rotate = rope_utils._apply_rotary_pos_emb_thd
            assert (rotate is megatron_cpu._rotate_packed) == (t is made[0])
            out = rotate(t, offsets, freqs, interleaved, False, 1.1, OneRank())
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        results.append((out, t.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_the_replacement_takes_what_megatron_core_gives() -> None:
    upstream = inspect.signature(rope_utils._apply_rotary_pos_emb_thd).parameters
    assert list(inspect.signature(megatron_cpu._rotate_packed).parameters) == list(upstream)
