"""Outputs that Megatron-Core lets go and computes again have the same gradients, and no compiler runs for them."""

from __future__ import annotations

import inspect

import pytest
import torch
from megatron.core.tensor_parallel import random

from megatron_rl.seams.megatron import copy_recomputed_outputs
from megatron_rl.seams.megatron_cpu import MegatronOnCpu, install_rng_tracker


def test_an_output_that_was_let_go_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "load_inline", lambda **_: pytest.fail("compiles"))
    install_rng_tracker()
    assert inspect.signature(random._get_share_storage).parameters == {}
    copy_recomputed_outputs()
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    torch.tanh(x).matmul(weight).sum().backward()
    expected = x.grad, weight.grad
    x.grad = weight.grad = None
    with MegatronOnCpu():
        checkpoint = random.CheckpointWithoutOutput(fp8=None)
        hidden = checkpoint.checkpoint(torch.tanh, x)
        out = hidden.matmul(weight)
        checkpoint.discard_output_and_register_recompute(out)
        assert hidden.untyped_storage().size() == 0
        out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])
