"""`rollout.exact`: the engine's log-probs are the actor's bit for bit, and an operation that is not the same is named."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import tiny

from megatron_rl.base import exact_rows as exact
from megatron_rl.config import ConfigError, Machine, check, check_machine, load_recipe, to_yaml
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.runtime import spawn
from megatron_rl.runtime.attempts import new_attempt, rank_environment
from megatron_rl.weights.create import create_model
from tests.e2e.job import rows, write_recipe
from tests.warm import run_ranks

from . import inside

RECIPE = (
    *(
        "rollout.exact=true",
        "rollout.sync_check_every=1",
        "trainer.steps=1",
        "trainer.eval_every=0",
        "checkpoint.every=0",
    ),
    *("rollout.max_prompt_tokens=100", "rollout.max_tokens=28", "sft.steps=0", "algorithm.correction.weight=token"),
    "algorithm.correction.filters=[{level: token, by: k1, low: -1.0e-30, high: 1.0e-30}]",
)
WORLDS = {
    "dense, float32, tensor parallel, prefixes kept": ("rollout.tensor_parallel=2", "actor.parallel.tensor=2"),
    "experts, bfloat16, prompts in parts": (
        *("model.create=null", "model.path={folder}/model", "model.dtype=bfloat16", "launch.processes=1"),
        *("rollout.tensor_parallel=1", "actor.parallel.tensor=1"),
    ),
}


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that `inside` makes."""
    folder, has_experts = tmp_path_factory.mktemp("exact"), request.param.startswith("experts")
    if has_experts:
        create_model(folder / "model", CreateModelConfig(layers=1, hidden_size=64, heads=4, ffn_size=64), seed=0)
        sizes = {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "hidden_size": 64,
            "moe_intermediate_size": 48,
            "vocab_size": 64,
        }
        written = tiny.write(folder / "written", "qwen3_moe", **sizes, eos_token_id=1, pad_token_id=0)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(written / name, folder / "model" / name)
    run_dir = folder / "run"
    run_dir.mkdir()
    overrides = (*RECIPE, *(text.format(folder=folder) for text in WORLDS[request.param]))
    (run_dir / "recipe.yaml").write_text(to_yaml(check(load_recipe(write_recipe(folder), overrides))))
    environment = {**rank_environment(0), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(inside.__file__), str(run_dir), "chunked" if has_experts else "kept"]
    outcome = run_ranks(command, 1 if has_experts else 2, new_attempt(run_dir), environment)
    assert outcome.code == 0, outcome.message
    return run_dir


@pytest.mark.engine
def test_engine_and_actor_compute_the_same_bits_in_any_batch(world: Path) -> None:
    found: dict[str, Any] = json.loads((world / "found.json").read_text())
    assert found["differing"] == []
    print(f"{found['scored']} sequences scored in batches by chance")
    assert found["drawn"] > 1000
    assert found["drawn otherwise"] == 0
    assert (found["cached"] > 1000) == ("experts" not in found["operations"])
    [row] = [row for row in rows(world) if row["step"] == 1]
    assert row["mismatch/abs_log_ratio_max"] == row["sync/logprob_max_diff"] == 0
    assert row["correction/dropped_share"] == 0, "a correction has nothing to correct"


@pytest.mark.engine
def test_an_operation_that_is_changed_in_the_engine_is_named(world: Path) -> None:
    found = json.loads((world / "found.json").read_text())
    here = {*found["operations"], "head"}
    assert here == {*inside.OPERATIONS} - (set() if "experts" in here else {"router", "experts"})
    assert found["seen"] == {"None": None} | {name: name if name in here else None for name in inside.OPERATIONS}


def test_no_row_depends_on_its_batch_and_one_that_does_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact.check_machine() == []
    sizes = itertools.cycle((1, 8))  # rows of a product
    unsteady: dict[str, tuple[str, Callable[..., Any]]] = {
        "product": ("product", lambda x, weight: x @ weight.t()),
        "silu": ("silu", F.silu),
        "rms_norm": ("rms_norm", lambda x, weight, eps: F.rms_norm(x, x.shape[1:], weight + len(x) * 1e-6, eps)),
        "attention": ("queries_of_item", lambda *_: next(sizes)),
    }
    for named, (function, other) in unsteady.items():
        with monkeypatch.context() as patch:
            patch.setattr(exact, function, other)
            assert named in exact.check_machine()


def of_kernels(script: str, folder: Path) -> dict[str, Any]:
    """What a script of this folder finds of a GPU's kernels."""
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder)]
    environment = {**rank_environment(0), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    outcome = spawn.run_ranks(command, 1, folder, environment)
    assert outcome.code == 0, outcome.message
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_on_a_gpu_the_actor_computes_what_vllms_engine_does(tmp_path: Path) -> None:
    """The kernels' sources, interpreted: how a card multiplies is not in it."""
    found = of_kernels("gpu_kernels.py", tmp_path)
    for dtype in ("torch.float32", "torch.bfloat16"):
        assert found[dtype] == {"unsteady": [], "attention": 0, "products": 0}
    assert found["unsteady with torch's products"] == ["product"]
    assert found["actor"]["log-probs"] < 1e-5
    assert found["actor"]["gradient"] < 1e-5
    assert found["actor"]["same bits"] < 1, "it has computed otherwise"


def test_a_gpu_is_told_the_same_of_few_rows_and_many_and_of_any_pages(tmp_path: Path) -> None:
    found = of_kernels("gpu_instructions.py", tmp_path)
    assert found.pop("as vLLM has tuned it") > 1
    assert len(found) == 6
    assert set(found.values()) == {1}, found


def test_the_operations_are_those_of_torch() -> None:
    """To rounding, with their gradients."""
    chance = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(size, generator=chance).requires_grad_() for size in ((70, 96), (96,)))
    pairs = (
        (exact.rms_norm(x, weight, 1e-6), F.rms_norm(x, (96,), weight, 1e-6)),
        (exact.silu(x), F.silu(x)),
        (exact.log_softmax(x, [64, 32]), x.log_softmax(dim=-1)),
        (exact.route(x, 3, False)[0].sort(dim=-1).values, x.topk(3).values.softmax(dim=-1).sort(dim=-1).values),
    )
    for number, (ours, theirs) in enumerate(pairs):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        seed = torch.randn(theirs.shape, generator=chance)
        inputs = (x, weight) if number == 0 else (x,)
        for mine, other in zip(*(torch.autograd.grad(y, inputs, seed) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    ties = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    assert exact.route(ties, 2, True)[1].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.tensor_parallel=1", "is not `actor.parallel.tensor`"),
        ("actor.parallel={tensor: 1, pipeline: 2}", "actor.parallel.pipeline"),
        ("actor.lora={rank: 4}", "does not cover `actor.lora`"),
        ("rollout.speculation={}", "does not cover `rollout.speculation`"),
    ],
)
def test_what_is_not_covered_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load_recipe(write_recipe(tmp_path), ("rollout.exact=true", override)))


def test_float32_is_refused_on_a_gpu_before_anything_starts(tmp_path: Path) -> None:
    recipe = check(load_recipe(write_recipe(tmp_path), ("rollout.exact=true", "rollout.tensor_parallel=2")))
    with pytest.raises(ConfigError, match="in TF32"):
        check_machine(recipe, Machine(gpus=8))
    recipe.model.dtype = "bfloat16"
    check_machine(recipe, Machine(gpus=8))
