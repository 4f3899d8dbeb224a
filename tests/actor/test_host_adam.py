"""The optimizer on the CPU computes what the other one does, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_rl.actor import host_adam
from megatron_rl.actor.actor import Actor
from megatron_rl.seams import megatron
from tests.checkpoint import ranks
from tests.checkpoint.ranks import Layout

from .test_update import alone, root

__all__ = ["alone", "root"]
pytestmark = pytest.mark.ranks


def state(actor: Actor) -> Iterator[tuple[str, Tensor]]:
    """This rank's masters and moments."""
    for part in megatron.optimizer_parts(actor.optimizer):
        for number, parameter in enumerate(part.model_param_group_index_map):
            tensors = megatron.states_of(part, parameter)
            yield from ((f"{number} {name}", tensors[name].detach().clone()) for name in megatron.PER_ELEMENT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_is_the_other_optimizers_bit_for_bit(root: Path, dtype: str) -> None:
    results = []
    for layout in (Layout(dtype=dtype), Layout(dtype=dtype, device="cpu")):
        actor = ranks.make_actor(root, layout)
        actor.config.offload = True
        for part in megatron.optimizer_parts(actor.optimizer):
            part.config.clip_grad = 0.01  # in force
            for group in part.optimizer.param_groups:
                group["weight_decay"] = 0.1
                group["fused"] = True  # torch's fused kernel, whose last bit is another than that of its loop
        with mock.patch.object(host_adam, "_BLOCK", 1024):
            metrics = [ranks.learn(actor, seed=1)]
            ranks.check_gradients_are_not_copied(actor)
            actor.offload()
            actor.onload()
            metrics.append(ranks.learn(actor, seed=2))
        weights = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
        results.append((metrics, weights | dict(state(actor))))
        ranks.close()
    (metrics, tensors), (own_metrics, own) = results
    assert own_metrics == metrics
    assert own.keys() == tensors.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in tensors.items())
