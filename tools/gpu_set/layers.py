"""The actor of every recipe with Transformer Engine's own layers, on tensors without content: `make check-gpu-set`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megatron_rl.actor import build
from megatron_rl.actor.actor import Actor
from megatron_rl.config import Config
from megatron_rl.config.checks import smallest_world
from megatron_rl.models import HFConfig, Model
from megatron_rl.planning.dummy_inputs import Zeros
from megatron_rl.planning.exact import META, with_plain_layers
from megatron_rl.runtime import device, distributed
from megatron_rl.seams.torch_meta import fake_world

from .inside import Wrong, recipes

Shapes = dict[object, tuple[int, ...]]


@contextmanager
def _of_transformer_engine() -> Iterator[None]:
    """While entered, models are built as on a H100, of Transformer Engine's layers, without content."""
    saved = device.has_transformer_engine, build.transformer_config
    cuda = torch.cuda.is_available, torch.cuda.get_device_capability

    def without_values(*arguments: Any) -> Any:
        config = saved[1](*arguments)
        config.use_cpu_initialization, config.init_model_with_meta_device = False, True
        return config

    device.has_transformer_engine = lambda: True
    build.transformer_config = without_values  # type: ignore[assignment]
    torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda *_: (9, 0)
    try:
        yield
    finally:
        torch.cuda.is_available, torch.cuda.get_device_capability = cuda
        device.has_transformer_engine, build.transformer_config = saved


def _weights(config: Config, hf_config: HFConfig, model: Model, world: int) -> tuple[Shapes, set[str]]:
    """Shapes of the first rank's weights by the map that loads and syncs them, and the kinds of layers that hold them."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        (Path(folder) / "config.json").write_text(json.dumps(dict(hf_config)))
        stack.enter_context(fake_world(0, world))
        stack.enter_context(device.without_content())
        stack.callback(parallel_state.destroy_model_parallel)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world))
        grid = distributed.initialize(config.actor.parallel, timeout_minutes=1.0)
        with META:
            actor = Actor(config, grid, folder, Zeros(model, build.DTYPES[config.model.dtype], META))
        modules = [module for chunk in actor.chunks for module in chunk.modules()]
        kinds = {_kind(module) for module in modules if next(module.parameters(recurse=False), None) is not None}
        return {key: tuple(weight.shape) for key, weight in actor.weights().items()}, kinds


def _kind(module: nn.Module) -> str:
    """Its class, of Transformer Engine's where Megatron-Core derives from one."""
    own = next(
        (kind for kind in type(module).__mro__ if kind.__module__.startswith("transformer_engine")), type(module)
    )
    return f"{own.__module__.partition('.')[0]}.{own.__name__}"


def layers(only: list[str]) -> str:
    """Every weight has a place in Transformer Engine's layers, in the shape that it has in the plain ones."""
    seen: set[tuple[object, ...]] = set()
    for name, config, hf_config, model in recipes(only):
        parallel = config.actor.parallel
        kind = (Path(str(config.model.path)).name, tuple(sorted(vars(parallel).items())), config.actor.fp8 is None)
        if kind in seen:
            continue
        seen.add(kind)
        world = smallest_world(config)
        with _of_transformer_engine():
            fused, kinds = _weights(config, hf_config, model, world)
        plain, _ = _weights(with_plain_layers(config), hf_config, model, world)
        if fused != plain:
            key = next(key for key in fused | plain if fused.get(key) != plain.get(key))
            raise Wrong(f"{name}: {key} is {fused.get(key)} in Transformer Engine and {plain.get(key)} in plain layers")
        named = sorted(own.partition(".")[2] for own in kinds if own.startswith("transformer_engine."))
        print(f"{name}: {len(fused)} weights of the first of {world} ranks, in {', '.join(named)}", flush=True)
        if not named:
            raise Wrong(f"{name}: no layer is Transformer Engine's")
    if not seen:
        raise Wrong("no recipe was tried")
    return f"{len(seen)} actors"
