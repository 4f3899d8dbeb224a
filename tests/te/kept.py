"""What `plan --exact` counts of layers in FP8, against what Transformer Engine's own modules keep in memory."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import load_recipe
from megatron_rl.config.schema import Config
from megatron_rl.models import model_of
from megatron_rl.planning import exact
from megatron_rl.planning.components import GIB, Part
from megatron_rl.planning.dummy_inputs import largest_micro_batch
from megatron_rl.planning.memory import make_plan
from megatron_rl.runtime import device
from megatron_rl.seams.megatron import Chunk, routers
from megatron_rl.seams.transformer_engine import parts
from tests.planning.planned_models import MOE, QWEN3, RECIPES
from tests.te.fp8 import as_on_a_gpu

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
MODELS = {"dense": {**QWEN3, **SIZES}, "experts": {**MOE, **SIZES, "moe_intermediate_size": 128}}
TOKENS = 528  # no multiple of 128: rows that pad them are counted


@dataclass(frozen=True)
class Case:
    model: str
    tensor: int  # with sequence parallelism, where there are several
    overrides: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        """Its model's, with a layer between the ends where these stay in bf16."""
        ends = any("bf16_ends" in key for key in self.overrides)
        return {**MODELS[self.model], "num_hidden_layers": 3 if ends else 2}


def cases(recipe: str) -> list[Case]:
    found = [Case(model, tensor) for model in MODELS for tensor in (1, 2)]
    found += [_again("dense", 1, "mlp"), _again("experts", 2, "moe"), Case("experts", 1, ("actor.recompute=full",))]
    if recipe != "delayed":
        found.append(_again("experts", 1, "layernorm,moe_act"))
        found += [Case(model, 1, ("actor.fp8.bf16_ends=1",)) for model in MODELS]
    if recipe != "mxfp8":
        found += [Case("dense", 1, ("actor.fp8.param_gather=true",))]
    return found


def _again(model: str, tensor: int, modules: str) -> Case:
    return Case(model, tensor, ("actor.recompute=selective", f"actor.recompute_modules=[{modules}]"))


def check(recipe: str) -> None:
    """What a micro-batch keeps until its backward pass within 3 %; weights and their copies in FP8 to the byte."""
    warnings.filterwarnings("ignore")
    as_on_a_gpu(blackwell=recipe == "mxfp8")
    for case in cases(recipe):
        config, model = _config(recipe, case), case.config
        kept, parameters, copies = _of_transformer_engine(config, model, case.tensor)
        with device.plain_layers():
            counted, [chunk], _ = exact._measure_rank(config, model, 0, case.tensor, True, exact.META)
        assert 0.97 < chunk.kept / kept < 1.03, (recipe, case, chunk.kept, kept)
        planned = {one.part: one.bytes for one in make_plan(config, model_of(model), case.tensor, GIB).components}
        assert parameters == counted.parameter_bytes == planned[Part.WEIGHTS], (recipe, case)
        assert copies == counted.fp8_bytes == planned.get(Part.FP8_COPIES, 0), (recipe, case)


def _config(recipe: str, case: Case) -> Config:
    gradients = "hybrid" if recipe == "delayed" else "e4m3"
    given = [
        "model.dtype=bfloat16",
        f"actor.tokens_per_microbatch={TOKENS}",
        f"actor.parallel={{tensor: {case.tensor}, sequence: {str(case.tensor > 1).lower()}}}",
        f"actor.fp8={{recipe: {recipe}, format: {gradients}}}",
        "actor.recompute=none",
        "rollout.max_tokens=504",  # two sequences: attention computes each by itself
    ]
    return load_recipe(RECIPES / "cpu" / "quickstart.yaml", [*given, *case.overrides])


def _of_transformer_engine(config: Config, model: dict[str, Any], world: int) -> tuple[int, int, int]:
    """Bytes: what a micro-batch keeps, parameters, and copies of weights in FP8."""
    with exact.built_rank(config, model, 0, world, torch.device("cpu")) as (actor, memory, _):
        for _, router in routers(actor.chunks[0]):
            router.register_forward_hook(exact._evenly)
        [chunk] = actor.ddp_chunks
        for _ in range(2):  # the first makes the copies
            gc.collect()
            found = exact._run_chunk(actor, chunk, largest_micro_batch(config, actor, TOKENS), memory)
        return found.kept, *_weights(actor.chunks[0])


def _weights(chunk: Chunk) -> tuple[int, int]:
    def size(tensor: Tensor) -> int:
        return sum(part.nbytes for part in parts(tensor) if part is not None)

    copies = [copy for module in chunk.modules() for copy in getattr(module, "_fp8_workspaces", {}).values()]
    return sum(map(size, chunk.parameters())), sum(map(size, copies))
