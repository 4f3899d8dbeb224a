"""Seeds, differences, shards and options: what can be checked without an engine."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config.actor import ActorConfig, FP8Config
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.published import published_config
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.models import model_of
from megatron_rl.rollout import environment
from megatron_rl.rollout.sampling import rollout_seed
from megatron_rl.rollout.sync import SyncDifference, chosen_otherwise, make_sync
from megatron_rl.rollout.vllm_engine import gpu_options
from megatron_rl.rollout.vllm_probe import is_shard
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.weights.checksum import Checksums


def test_a_seed_belongs_to_one_rollout():
    base = rollout_seed(0, 1, "task/7", 2)
    assert base == rollout_seed(0, 1, "task/7", 2)
    others = [rollout_seed(1, 1, "task/7", 2), rollout_seed(0, 2, "task/7", 2), rollout_seed(0, 1, "task/8", 2)]
    others += [rollout_seed(0, 1, "task/7", 3), rollout_seed(0, -1, "task/7", 2)]
    assert len({base, *others}) == 6
    assert all(0 <= seed < 2**62 for seed in (base, *others))


@pytest.mark.parametrize(
    ("recipe", "experts", "tolerance"),
    [
        (Config(run_dir="", model=ModelConfig(dtype="float32")), 0, 3e-5),
        (Config(run_dir="", model=ModelConfig(dtype="bfloat16")), 0, 0.05),
        (Config(run_dir="", model=ModelConfig(dtype="bfloat16")), 8, 0.1),
        (Config(run_dir="", actor=ActorConfig(fp8=FP8Config())), 8, 0.2),
        (Config(run_dir="", rollout=RolloutConfig(fp8="blockwise")), 0, 0.2),
        (Config(run_dir="", rollout=RolloutConfig(sync_tolerance=0.7, fp8="blockwise")), 0, 0.7),
    ],
)
def test_what_a_sync_may_differ_by_unless_the_recipe_says(recipe: Config, experts: int, tolerance: float) -> None:
    recipe.rollout.sync = "whole"
    actor: Any = SimpleNamespace(model=SimpleNamespace(experts=experts))
    engine: Any = None
    assert make_sync(recipe, ALONE, actor, engine, print).tolerance == tolerance


def test_an_engine_shard_is_found_along_either_dimension():
    full = torch.arange(48.0).view(6, 8)
    assert is_shard(full, full, 0, 1)
    assert is_shard(full[3:], full, 1, 2)
    assert is_shard(full[:, 4:], full, 1, 2)
    assert not is_shard(full[:3], full, 1, 2)
    padded = torch.zeros(4, 8)
    padded[:2] = full[4:]
    assert is_shard(padded, full, 1, 2)  # a vocabulary of 6 rows, padded to 8 over two ranks
    assert not is_shard(full + 1, full, 0, 1)


def test_two_kernels_in_bf16_may_differ_much_at_single_tokens():
    random = np.random.default_rng(0)
    heavy_tailed = np.abs(random.standard_t(2, 20_000)) * 0.01
    heavy_tailed[:3] = 1.5
    difference = SyncDifference.of(heavy_tailed)
    assert difference.largest >= 1.5
    assert difference.mean < 0.05
    assert difference.within(0.05)
    assert not difference.within(0.01)


def test_a_few_wrong_tokens_are_seen_by_the_percentile():
    differences = np.full(1000, 1e-3)
    differences[:11] = 2.0
    assert SyncDifference.of(differences).mean < 0.05
    assert not SyncDifference.of(differences).within(0.05)


def test_experts_are_compared_by_layer_as_sets() -> None:
    of_engine = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])  # [tokens, layers, experts per token]
    assert chosen_otherwise(of_engine, of_engine[..., ::-1].astype(np.int16)).tolist() == [0, 0]
    of_actor = of_engine.copy()
    of_actor[1, 0] = [5, 0]
    assert chosen_otherwise(of_engine, of_actor).tolist() == [0.25, 0]
    two_routers = np.random.default_rng(0).random((2, 5000, 1, 8)).argsort(axis=-1)[..., :2]
    assert chosen_otherwise(*two_routers)[0] == pytest.approx(1 - 2 / 8, abs=0.02)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_difference_that_is_not_finite_is_never_within(value: float):
    assert not SyncDifference.of(np.array([*[0.0] * 500, value])).within(1e6)


def test_vllm_takes_the_options_of_a_gpu():
    from vllm import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    dense, experts = (model_of(published_config(name)) for name in ("Qwen3-8B", "Qwen3-30B-A3B"))
    config = RolloutConfig(memory_fraction=0.7, async_scheduling=False)
    args = EngineArgs(model="any", **gpu_options(config, experts))
    assert (args.moe_backend, args.async_scheduling, args.gpu_memory_utilization) == ("triton", False, 0.7)
    assert args.enable_flashinfer_autotune is False
    assert EngineArgs(model="any", **gpu_options(RolloutConfig(), dense)).moe_backend == "auto"
    args = EngineArgs(model="any", **gpu_options(RolloutConfig(exact=True), dense))
    assert args.enforce_eager
    assert AttentionBackendEnum[str(args.attention_backend)].get_class().supports_batch_invariance()


def test_vllms_runner_is_chosen_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")  # what is set below is undone at the end
    for has_gpu, chosen in ((True, "1"), (False, "0")):
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        monkeypatch.setattr(environment.device, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(environment.device, "is_hopper", lambda: False)
        environment.prepare()
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == chosen
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    environment.prepare()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1", "the user's"


@pytest.mark.parametrize("hopper", [True, False])
def test_fp8_rollouts_compute_with_the_scales_that_are_sent(monkeypatch: pytest.MonkeyPatch, hopper: bool) -> None:
    """What vLLM itself makes of the variables; on other cards its defaults hold, which their kernels need."""
    from vllm import envs

    for name in environment.FP8_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment.device, "is_hopper", lambda: hopper)
    environment.prepare()
    assert envs.VLLM_USE_DEEP_GEMM_E8M0 is not hopper
    assert envs.VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER is not hopper
    assert environment.overridden() == []
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    environment.prepare()
    assert envs.VLLM_USE_DEEP_GEMM_E8M0, "the user's"
    assert environment.overridden() == ["VLLM_USE_DEEP_GEMM_E8M0=1"] * hopper


def checksum(*matrices: torch.Tensor, integer: torch.dtype = torch.int32) -> list[int]:
    sums = Checksums()
    sums.add([torch.zeros(3, 2)], integer)  # another box before it
    sums.add(matrices, integer)
    return sums.take()[1].tolist()


def test_a_checksum_is_of_the_numbers_and_not_of_where_they_lie():
    box = torch.randn(2, 6, 4)
    whole = torch.full((2, 9, 16), 7.0)
    whole[:, 1:7, 8:12] = box
    assert checksum(box) == checksum(*box) == checksum(whole[:, 1:7, 8:12])
    assert checksum(box, integer=torch.int64) == checksum(whole[:, 1:7, 8:12], integer=torch.int64)
    shifted = torch.cat([torch.zeros(1), box.flatten()])[1:].view(2, 6, 4)  # begins in the middle of a word
    assert checksum(box, integer=torch.int64) == checksum(shifted, integer=torch.int64)
    assert checksum(torch.arange(5.0)) == checksum(torch.arange(10.0)[:5])


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_a_checksum_sees_another_number_and_another_order(integer: torch.dtype):
    box = torch.randn(2, 6, 4)
    others = [box.flip(0), box.flip(1), box.roll(2, 2), box[:, [1, 0, 2, 3, 4, 5]], torch.zeros_like(box), -box]
    for bit in (0, 31):
        changed = box.clone()
        changed.view(torch.int32)[1, 3, 2] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        others.append(changed)
    assert len({tuple(checksum(each, integer=integer)) for each in (box, *others)}) == 1 + len(others)
