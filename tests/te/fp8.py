"""What ranks with Transformer Engine compute in FP8 in the tests of this folder."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.actor import fp8_training as fp8
from megatron_rl.actor.actor import Actor
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.config.actor import FP8Config, OptimizerConfig, ParallelConfig
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch
from megatron_rl.runtime import device, distributed
from megatron_rl.seams.transformer_engine import parts
from tests.actor.layouts import make_batch
from tests.checkpoint import ranks
from tests.models import tiny
from tests.te.standin import quantize

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
# Mean difference of a log-prob from bf16's in this random model, whose log-probs are -4.4 in the mean: measured 0.08 to 0.09.
BAND = 0.15


@dataclass(frozen=True)
class Case:
    recipe: str | None  # None: bf16
    experts: bool = False
    param_gather: bool = False
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    format: str = "e4m3"
    overlap: bool = False  # of data-parallel communication with computation, as on a GPU

    @property
    def in_bf16(self) -> Case:
        return replace(self, recipe=None, format="e4m3", param_gather=False, overlap=False)


def write_models(root: Path) -> None:
    for name, variant, sizes in (("dense", "qwen3", SIZES), ("experts", "qwen3_moe", SIZES | EXPERTS)):
        folder = tiny.write(root / name, variant, **sizes)
        [file] = folder.glob("*.safetensors")
        weights = {key: value if "norm" in key else 0.3 * value for key, value in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})


def as_on_a_gpu(blackwell: bool = False) -> None:
    """What FP8 needs beyond the stand-ins: a card that has it."""
    from megatron.core.distributed import param_and_grad_buffer
    from transformer_engine.pytorch import quantization, utils

    fp8.device = SimpleNamespace(has_gpu=lambda: True, has_transformer_engine=lambda: True)
    torch.Tensor.record_stream = lambda tensor, stream: None
    # gloo cannot, or takes several buffers gathered together for the first one's type; one after the other, each waited for,
    # is the same.
    for module in (param_and_grad_buffer, torch.distributed):
        module._coalescing_manager = lambda *_, **__: contextlib.nullcontext(SimpleNamespace(wait=lambda: None))
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(param_and_grad_buffer, name, _at_once(getattr(param_and_grad_buffer, name)))
    if blackwell:
        properties = torch.cuda.get_device_properties()
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(**{**vars(properties), "major": 10})
        torch.cuda.get_device_capability = lambda *_: (10, 0)
        for function in (*vars(utils).values(), *vars(quantization).values()):
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()


def _at_once(collective: Callable[..., None]) -> Callable[..., None]:
    return lambda *tensors, async_op, **options: collective(*tensors, **options)


def make_actor(root: str, case: Case, tokens: int = 96) -> Actor:
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    config = Config(run_dir=f"{root}/run")
    config.model.dtype = "bfloat16"
    config.actor.parallel = ParallelConfig(
        tensor=case.tensor, sequence=case.tensor > 1, pipeline=case.pipeline, expert=case.expert
    )
    config.actor.tokens_per_microbatch = tokens
    config.actor.overlap = case.overlap
    config.actor.optimizer = OptimizerConfig(lr=1e-3)
    if case.recipe is not None:
        config.actor.fp8 = FP8Config(recipe=case.recipe, format=case.format, param_gather=case.param_gather)
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):  # as on Hopper (`FP32_SCALES`)
        setattr(Float8BlockScaling, name, QParams(power_2_scale=case.param_gather))
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=5)
    actor = Actor(config, grid, Path(root) / ("experts" if case.experts else "dense"))
    actor.recipe = config
    return actor


def batch() -> TokenBatch:
    return make_batch(groups=3).sequences


def score(actor: Actor) -> Tensor:
    """This rank's log-probs of the batch, in its order of micro-batches; [0] except on the last stage."""
    return torch.cat([torch.zeros(0), *(found for found, _ in actor.log_probs(actor.micro_batches(batch()), 1.0))])


def update(actor: Actor) -> float:
    """One step towards the batch; the gradient's norm."""
    micro_batches = actor.micro_batches(batch())
    return actor.update(micro_batches, lambda number, found, entropy: (-found.mean(), Metrics()), 1.0).grad_norm


# ------------------------------------------------------------------------------------------------------------ the steps
def steps(root: str, cases: Sequence[Case], blackwell: bool = False) -> None:
    """Of every case two updates: log-probs and gradient norm near bf16's, a weight that has learned."""
    as_on_a_gpu(blackwell)
    near: dict[Case, tuple[Tensor, float, Tensor]] = {}
    for case in cases:
        actor = make_actor(root, case)
        rows = {len(micro.tokens) for micro in actor.micro_batches(batch())}
        actor.start_optimizer(actor.optimizer_config, 10)
        before = score(actor)
        norms = [update(actor), update(actor)]
        found = before, norms[0], score(actor)
        if case.recipe is None:
            near[case] = found
        else:
            want = near[case.in_bf16]
            multiple = case.tensor * fp8.rows_multiple(actor.config.fp8)
            assert all(count % multiple == 0 for count in rows), (case, rows)
            assert abs(norms[0] - want[1]) < 0.15 * want[1], (case, norms, want[1])
            if actor.grid.is_last_stage:
                apart = [(own - other).abs().mean().item() for own, other in ((before, want[0]), (found[2], want[2]))]
                assert max(apart) < BAND, (case, apart)
                assert found[2].mean() > before.mean()
        ranks.close()


def _answer(right: list[float], number: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Metrics]:
    right.append((log_probs > math.log(0.5)).float().mean().item())
    return -log_probs.mean(), Metrics()


def curve(root: str, recipes: Sequence[Case]) -> None:
    """60 updates on sums modulo 8 of two numbers: FP8 learns what bf16 learns, as fast but for noise."""
    as_on_a_gpu()
    answers = (([a, b, 60], [20 + (a + b) % 8]) for a in range(8) for b in range(8))
    table = TokenBatch.continuations(answers)
    found = {}
    for case in recipes:
        actor = make_actor(root, case, tokens=512)
        actor.start_optimizer(actor.optimizer_config, 60)
        micro_batches = actor.micro_batches(table)

        right: list[float] = []  # share of the answers that have more than half of the probability
        for _ in range(60):
            actor.update(micro_batches, partial(_answer, right), 1.0)
        assert len(right) == 60  # one micro-batch
        found[case] = (sum(right) / 60, right[-1])
        ranks.close()
    mean, end = found[recipes[0]]
    assert end == 1
    for case, (own, own_end) in found.items():
        assert own_end == 1, (case, own_end)
        assert abs(own - mean) < 0.05, (case, own, mean)


# ------------------------------------------------------------------------------------------------- parameters in FP8
def fp8_parameters(actor: Actor) -> list[Tensor]:
    from megatron.core.fp8_utils import is_float8tensor

    return [weight for chunk in actor.chunks for weight in chunk.parameters() if is_float8tensor(weight)]


def masters(actor: Actor) -> list[Tensor]:
    """This rank's part of the fp32 masters of FP8 parameters."""
    return [weight.main_param.clone() for weight in fp8_parameters(actor)]


def parameters(root: str, cases: Sequence[Case]) -> None:
    """Masters after loading and after another optimizer, export and loading, the reference policy."""
    as_on_a_gpu()
    for case in cases:
        with device.megatron():
            _parameters(root, case)
        ranks.close()


def _parameters(root: str, case: Case) -> None:
    plain = make_actor(root, Case(None, case.experts, tensor=case.tensor))
    loaded = [weight.detach().clone() for chunk in plain.chunks for weight in chunk.parameters()]
    ranks.close()
    actor = make_actor(root, case)
    own = [weight for chunk in actor.chunks for weight in chunk.parameters()]
    actor.start_optimizer(actor.optimizer_config, 10)
    count = 0
    for weight, value in zip(own, loaded, strict=True):
        if hasattr(weight, "_quantizer"):
            count += 1
            assert torch.equal(weight.main_param, value.float().view(-1)), case
            assert not torch.equal(weight.dequantize(), value), case
    assert count == len(fp8_parameters(actor)) > 4

    update(actor)
    for weight in fp8_parameters(actor):
        assert torch.equal(quantize.operand(weight, False), quantize.operand(weight, True)), case
        error = (weight.main_param.view(weight.shape) - weight.dequantize()).abs().max()
        assert error < 0.07 * weight.main_param.abs().max(), case

    exported = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
    scores, values = score(actor), [weight.dequantize().clone() for weight in fp8_parameters(actor)]
    actor.config.offload = actor.config.offload_weights = True
    actor.offload()
    actor.offload_weights()
    assert not any(part.untyped_storage().nbytes() for weight in own for part in parts(weight) if part is not None), (
        case
    )
    actor.onload()
    assert torch.equal(score(actor), scores), case

    actor.keep_reference()
    update(actor)
    trained = [weight.dequantize().clone() for weight in fp8_parameters(actor)]
    with actor.as_reference():
        assert all(map(torch.equal, [weight.dequantize() for weight in fp8_parameters(actor)], values)), case
        assert torch.equal(score(actor), scores), case
    assert all(map(torch.equal, [weight.dequantize() for weight in fp8_parameters(actor)], trained)), case

    actor.start_optimizer(actor.optimizer_config, 10)  # as RL does after a warm-up
    for master, value in zip(masters(actor), trained, strict=True):
        assert torch.equal(master, value.float().view(-1)), case
    assert update(actor) > 0

    folder = Path(root) / f"exported-{case.recipe}-{case.experts}-{case.overlap}"
    folder.mkdir()
    save_file(exported, folder / "model.safetensors")
    actor.load_hf(folder)
    again = dict(actor.iter_hf_weights())
    assert all(torch.equal(again[name], tensor) for name, tensor in exported.items()), case


# --------------------------------------------------------------------------------------------------------- checkpoints
def checkpoints(root: str, case: Case, other: Case) -> None:
    """Saved before the first update and after it, loaded at the same and at another layout."""
    as_on_a_gpu()
    folder = Path(root) / "saved" / f"{case.recipe}-{case.param_gather}"
    if int(os.environ["RANK"]) == 0:
        folder.parent.mkdir(exist_ok=True)
    actor = make_actor(root, case)
    actor.start_optimizer(actor.optimizer_config, 10)
    saver = ranks.save(actor, folder, 0)
    update(actor)
    ranks.save(actor, folder, 1, saver)
    update(actor)
    want = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
    assert [outcome.error for outcome in saver.outcomes()] == [None, None]
    ranks.close()
    for layout in (case, other):
        actor = make_actor(root, layout)
        actor.start_optimizer(actor.optimizer_config, 10)
        ranks.load(actor, folder / "step_0", 0)
        update(actor)
        ranks.load(actor, folder / "step_1", 1)
        saver = ranks.save(actor, folder.with_name(f"{folder.name}-{layout.tensor}"), 1)
        assert [outcome.error for outcome in saver.outcomes()] == [None]
        update(actor)
        for name, tensor in actor.iter_hf_weights():
            apart = (tensor.double() - want[name].double()).norm() / want[name].double().norm()
            assert apart < (1e-9 if layout == case else 2e-2), (layout, name, apart)
        ranks.close()
