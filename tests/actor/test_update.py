"""Optimizer steps in one process: what Megatron's own `step` does, with one pass over the gradients; state on the host in
between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.actor import actor as actor_module
from megatron_rl.actor.actor import Actor
from megatron_rl.actor.optimizer_step import take_step
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.runtime import device
from megatron_rl.seams import megatron
from megatron_rl.weights.create import create_model
from tests.checkpoint import ranks
from tests.checkpoint.ranks import Layout

from .layouts import SHAPE

KINDS = [Layout(dtype=dtype, distributed=sharded) for dtype in ("float32", "bfloat16") for sharded in (True, False)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("update")
    create_model(folder / Layout().model, CreateModelConfig(**{**vars(SHAPE), "layers": 2, "init_std": 0.15}), seed=5)
    return folder


@pytest.fixture
def actor(root: Path, kind: Layout) -> Iterator[Actor]:
    try:
        yield ranks.make_actor(root, kind)
    finally:
        ranks.close()


def learned(actor: Actor) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Two optimizer steps: metrics, and every weight and number of the optimizer afterwards."""
    metrics = ranks.learn(actor, seed=1)
    tensors = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
    for i, part in enumerate(megatron.optimizer_parts(actor.optimizer)):
        for j, state in enumerate(part.optimizer.state.values()):
            tensors |= {f"{i} {j} {name}": value.clone() for name, value in state.items()}
    return metrics, tensors


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@each_kind
def test_a_step_is_megatrons_with_one_pass_over_the_gradients(root: Path, kind: Layout) -> None:
    def megatrons(optimizer: megatron.Optimizer, rate: float, number: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate
        with device.megatron():
            success, norm, _ = optimizer.step()  # type: ignore[attr-defined]
        assert success
        return float(norm)

    results = []
    for step in (take_step, megatrons):
        actor = ranks.make_actor(root, kind)
        actor.optimizer_config.clip_grad = 0.01
        for part in megatron.optimizer_parts(actor.optimizer):
            part.config.clip_grad = 0.01  # in force
        prepare = mock.Mock(side_effect=actor.optimizer.prepare_grads)
        actor.optimizer.prepare_grads = prepare
        with mock.patch.object(actor_module, "take_step", step):
            results.append(learned(actor))
        assert prepare.call_count == 2, "one per optimizer step"
        ranks.close()
    (metrics, tensors), (expected_metrics, expected) = results
    assert metrics["actor/grad_norm"] > 0.01
    assert metrics == expected_metrics
    assert same(tensors, expected)


@each_kind
def test_offloaded_state_comes_back_bit_for_bit(root: Path, kind: Layout) -> None:
    results, made = [], mock.Mock(side_effect=device.host_buffer)
    for offload in (False, True):
        actor = ranks.make_actor(root, kind)
        actor.config.offload = actor.config.offload_weights = offload
        tensors: dict[str, Tensor] = {}
        for _ in range(3):
            with mock.patch.object(device, "host_buffer", made):
                actor.offload()
                actor.offload()  # before the engine starts, and when it takes the device
                if offload:
                    check_away(actor)
                actor.offload_weights()
            if offload:
                assert not any(p.untyped_storage().nbytes() for chunk in actor.chunks for p in chunk.parameters())
            actor.onload()
            metrics, tensors = learned(actor)
        results.append((metrics, tensors))
        ranks.close()
    (metrics, tensors), (offloaded_metrics, offloaded_tensors) = results
    assert metrics == offloaded_metrics
    assert same(tensors, offloaded_tensors)
    masters = 1 if kind.dtype == "bfloat16" else 0
    state = sum(tensor.nbytes for name, tensor in tensors.items() if "exp_avg" in name) * (2 + masters) / 2
    state += sum(weight.nbytes for name, weight in tensors.items() if "exp_avg" not in name)
    pinned = sum(call.args[0] for call in made.call_args_list)
    assert state <= pinned < 1.5 * state, "made once, not in each of three rounds"


def check_away(actor: Actor) -> None:
    """The optimizer's state and the gradients take no memory, and the weights are whole: a sync reads them."""
    state = [s for part in megatron.optimizer_parts(actor.optimizer) for s in part.optimizer.state.values()]
    assert all(
        s["exp_avg"].untyped_storage().nbytes() == s["exp_avg_sq"].untyped_storage().nbytes() == 0 for s in state
    )
    assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for c in actor.ddp_chunks for buffer in c.buffers)
    assert all(torch.isfinite(weight).all() for _, weight in actor.iter_hf_weights())


def test_state_that_comes_back_is_waited_for_after_the_backward_pass(root: Path) -> None:
    actor, order = ranks.make_actor(root, Layout()), list[str]()

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (order.append(name), function(*args, **options))[1]

    actor._run = noted("run", actor._run)  # type: ignore[method-assign]
    actor._memory.wait = noted("wait", actor._memory.wait)  # type: ignore[method-assign]
    ranks.learn(actor, seed=1)
    ranks.close()
    # The second minibatch's old log-probs, then two updates.
    assert [name for name, _ in groupby(order)] == ["run", "wait", "run", "wait"]


def test_a_gradient_norm_that_is_a_tensor_as_on_a_gpu_becomes_a_number(root: Path) -> None:
    """Metrics are printed and written as JSON: the first run on a card ended with the first line of its progress."""
    actor = ranks.make_actor(root, KINDS[0])
    try:
        norm = actor.optimizer.get_grad_norm
        with mock.patch.object(actor.optimizer, "get_grad_norm", side_effect=lambda: torch.as_tensor(norm())):
            metrics = ranks.learn(actor, seed=1, groups=2)
    finally:
        ranks.close()
    assert isinstance(metrics["actor/grad_norm"], float)
