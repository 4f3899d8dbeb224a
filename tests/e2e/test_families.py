"""Every family of models from warm-up to evaluation: RL, weight sync and its check, checkpoint, resume, export."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from models import published, seeing, tiny
from safetensors.torch import load_file

from megatron_rl.config import load_recipe, to_yaml
from megatron_rl.config.model import CreateModelConfig, CreateVisionConfig
from megatron_rl.config.model_checks import CPU_HEAD_SIZES
from megatron_rl.models import read_hf_config
from megatron_rl.runtime.attempts import rank_environment
from megatron_rl.weights.create import create_model
from tests.warm import Warm

from . import forked
from .job import RECIPE, rows, samples, untimed

pytestmark = pytest.mark.engine
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"vocab_size": 63, "eos_token_id": 1, "pad_token_id": 0}  # odd: padded for tensor parallelism
# 48 is not what vLLM's kernels for experts take on a CPU: it pads them, again after every sync.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
STACKED = {"num_local_experts": 4, "num_experts_per_tok": 2}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # Qwen2's head is hidden_size / num_attention_heads
GATED_DELTA = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
TIED = {"tie_word_embeddings": True}
EP = ("actor.parallel.expert=2", "rollout.tensor_parallel=2", "rollout.expert_parallel=true")
TP = ("actor.parallel={tensor: 2, sequence: true}", "rollout.tensor_parallel=2")
VISION = ("vision", "vision-qwen3_vl", "vision-qwen3_vl_moe")  # made by `model.create`, and what is put in its place
FROZEN = "actor.freeze_vision_tower=true"
# Both with fewer positions than sequences have, 36, before they are scaled.
YARN = {**tiny.YARN, "rope_theta": 100.0, "truncate": False, "attention_factor": 1.2, "beta_fast": 4.0}
STRETCHED = ("model.rope_scaling={factor: 16, original_max_position_embeddings: 16}",)
# vLLM's latent attention on a CPU has kernels for one size of latents.
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 64}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
BALANCED = ("actor.moe.bias_update_rate=0.01",)
BF16 = ("model.dtype=bfloat16",)  # what vLLM's gated-delta layers take on a CPU
EXACT = ("rollout.exact=true",)
# name -> (variant of `tiny`, changes to its config, processes, overrides of the recipe)
MODELS: dict[str, tuple[str, dict[str, Any], int, Sequence[str]]] = {
    "qwen2": ("qwen2", TWO_HEADS, 1, EXACT),
    "qwen2-tied": ("qwen2", {**TWO_HEADS, **TIED}, 1, ()),
    "qwen3-stretched": ("qwen3", {"max_position_embeddings": 20}, 1, STRETCHED),
    "qwen3-tied": ("qwen3", TIED, 1, ()),
    "qwen3-tied-with-a-copy": ("qwen3", TIED, 1, ()),
    "qwen3_moe": ("qwen3_moe", EXPERTS, 1, ()),
    "qwen3_moe-tied": ("qwen3_moe-unnormalised", {**EXPERTS, **TIED}, 1, ()),
    "gpt_oss": ("gpt_oss", STACKED, 1, ()),
    "llama-yarn": ("llama", {"rope_parameters": YARN}, 1, ()),
    "llama3-tied": ("llama3", TIED, 1, EXACT),
    "mistral": ("mistral", {}, 1, EXACT),
    "mistral-tied": ("mistral", TIED, 1, ()),
    "ministral": ("ministral", {}, 1, ()),
    "qwen3_5": ("qwen3_5", GATED_DELTA, 1, BF16),
    "qwen3_5_moe-TP-2": ("published-qwen3_5_moe", {**EXPERTS, **GATED_DELTA}, 2, (*TP, *BF16)),
    "qwen3-tied-TP-2": ("qwen3", TIED, 2, ("actor.parallel.tensor=2", "rollout.tensor_parallel=2")),
    "qwen2-tied-PP-2": ("qwen2", {**TWO_HEADS, **TIED}, 2, ("actor.parallel.pipeline=2",)),
    "qwen3_moe-EP-2": ("qwen3_moe", EXPERTS, 2, EP),
    "gpt_oss-TP-2-lora": ("gpt_oss", STACKED, 2, (*TP, "actor.lora.rank=4")),
    "qwen2_5_vl": ("vision", {}, 1, ()),
    "qwen2_5_vl-TP-2-lora": ("vision", {}, 2, (*TP, "actor.lora.rank=4")),
    "qwen2_5_vl-tied-PP-2-frozen": ("vision", TIED, 2, ("actor.parallel.pipeline=2", FROZEN)),
    "qwen3_vl": ("vision-qwen3_vl", {}, 1, ()),
    "qwen3_vl_moe-EP-2": ("vision-qwen3_vl_moe", {}, 2, EP),
    "qwen3_vl-tied-TP-2-lora": ("vision-qwen3_vl", TIED, 2, (*TP, "actor.lora.rank=4")),
    "deepseek_v3": ("deepseek_v3-yarn", {**LATENTS, **GROUPED}, 1, BALANCED),
    "deepseek_v3-TP-2-EP-2": (
        "deepseek_v3-yarn",
        {**LATENTS, **GROUPED},
        2,
        (*TP, "actor.parallel.expert=2", "rollout.expert_parallel=true", *BALANCED),
    ),
    "glm4_moe": ("glm4_moe", GROUPED, 1, BALANCED),
}
# Prompts with an image each, for those of VISION.
BARS = {
    "train": {"sums": {"source": "bars", "size": 60, "demonstrations": "chain_sum_steps"}},
    "eval": {"held_out": {"source": "bars", "size": 8, "seed": 77}},
}
# A reward that differs between the responses of untrained models.
REWARD = "def letters():\n    return lambda completion, sample: sum(map(ord, completion)) % 7 / 6\n"
OVERRIDES = (
    "sft.steps=2",
    "sft.batch_size=4",
    "trainer.steps=2",
    "trainer.prompts_per_step=4",
    "trainer.minibatches=1",
    "trainer.eval_every=2",
    "checkpoint.asynchronous=false",
    "logging.tensorboard=false",
)


def write_model(folder: Path, tokenizer: Path, variant: str, changes: dict[str, Any], with_copy: bool) -> None:
    if variant in VISION:
        shape = {
            "hidden_size": 64,
            "heads": 2,
            "kv_heads": 2,
            "ffn_size": 64,
            "init_std": 0.1,
            "characters": "0123456789+-=# rgb",
        }
        create = CreateModelConfig(**shape, tie_embeddings=bool(changes), vision=CreateVisionConfig(window=16))
        create_model(folder, create, seed=0)
        if variant != "vision":
            seeing.replace_model(folder, variant.partition("-")[2])
        return
    write, name = (published.write if "published" in variant else tiny.write), variant.removeprefix("published-")
    write(folder, name, **{**SIZES, **changes})
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)
    if with_copy:
        from safetensors.torch import save_file

        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write_recipe(folder: Path, variant: str, processes: int, overrides: Sequence[str]) -> None:
    (folder / "reward.py").write_text(REWARD)
    recipe = {**RECIPE, "rewards": {"letters": {"reward": f"{folder / 'reward.py'}:letters"}}}
    if variant in VISION:
        recipe |= {"tasks": BARS, "rollout": {**RECIPE["rollout"], "max_prompt_tokens": 24}}
    (folder / "base.yaml").write_text(yaml.safe_dump({**recipe, "run_dir": str(folder / "run")}, sort_keys=False))
    given = ["model.create=null", f"model.path={folder / 'model'}", f"launch.processes={processes}", *OVERRIDES]
    given += ["actor.parallel.tensor=1", "rollout.tensor_parallel=1", *overrides]
    (folder / "recipe.yaml").write_text(to_yaml(load_recipe(folder / "base.yaml", given)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, which `forked` makes."""
    root = tmp_path_factory.mktemp("families")
    small = CreateModelConfig(layers=1, hidden_size=8, heads=1, kv_heads=1, head_dim=8, vocab_size=SIZES["vocab_size"])
    create_model(root / "tokenizer", small, seed=0)
    for name, (variant, changes, processes, overrides) in MODELS.items():
        write_model(root / name / "model", root / "tokenizer", variant, changes, "copy" in name)
        write_recipe(root / name, variant, processes, overrides)
    single = [name for name, (_, _, processes, _) in MODELS.items() if processes == 1]
    double = [name for name in MODELS if name not in single]
    (root / "lanes.json").write_text(json.dumps({"one rank": [single[::2], single[1::2]], "two ranks": double}))
    with (root / "all.log").open("wb") as log:
        process = Warm([forked.__file__, str(root)], {**os.environ, **rank_environment(0)}, log, log)
    try:
        assert process.wait(3000) == 0, (root / "all.log").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its forks too
    return root


def in_bf16(name: str) -> bool:
    return "model.dtype=bfloat16" in MODELS[name][3]


def ended_well(folder: Path, part: str) -> None:
    code = folder / f"{part}.code"
    assert code.exists(), f"{part} was not reached"
    assert code.read_text() == "0", (folder / f"{part}.log").read_text()[-3000:]


def test_the_recipes_check_knows_vllms_attention_on_a_cpu(root: Path) -> None:
    assert json.loads((root / "head_sizes.json").read_text()) == list(CPU_HEAD_SIZES)


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_and_the_engine_follows(root: Path, name: str) -> None:
    ended_well(root / name, "train")
    _, *steps = rows(root / name / "straight")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        if in_bf16(name):  # experts that are nearly as good as others are chosen otherwise
            assert row["sync/logprob_mean_diff"] < 0.05
        else:
            assert row["sync/logprob_max_diff"] < 1e-4
        if MODELS[name][3] == EXACT:
            assert row["sync/logprob_max_diff"] == row["mismatch/abs_log_ratio_max"] == 0
        assert row["actor/grad_norm"] > 0
    exported = json.loads((root / name / "straight/export/config.json").read_text())
    assert exported["architectures"] == read_hf_config(root / name / "model")["architectures"]
    weights = load_file(root / name / "straight/export/model.safetensors")
    assert ("lm_head.weight" in weights) == ("tied" not in name)
    if "stretched" in name:
        assert (exported["max_position_embeddings"], exported["rope_parameters"]["rope_type"]) == (256, "yarn")


@pytest.mark.parametrize("name", MODELS)
def test_slices_bring_what_whole_tensors_bring(root: Path, name: str) -> None:
    """After every sync of the run, on every rank, with training in between."""
    log = (root / name / "train.log").read_text()
    compared = re.findall(r"slices and whole tensors: (\d+) weights, (\d+) differ", log)
    assert len(compared) >= 3 * MODELS[name][2], log[-2000:]
    assert all(int(weights) > 20 and differ == "0" for weights, differ in compared), compared


@pytest.mark.parametrize("name", [name for name in MODELS if name not in forked.NOT_RESUMED])
def test_a_resumed_run_ends_at_the_same_weights(root: Path, name: str) -> None:
    ended_well(root / name, "resumed")
    own, want = root / name / "run", root / name / "straight"
    assert "continuing after step 1" in (root / name / "resumed.log").read_text()
    assert [untimed(row) for row in rows(own)] == [untimed(row) for row in rows(want)]
    weights = [(run / "export" / "model.safetensors").read_bytes() for run in (own, want)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, "export") for name in MODELS if name not in forked.SAME_EXPORT),
        *((name, "checkpoint") for name in forked.CHECKPOINTS),
    ],
)
def test_an_evaluation_answers_as_the_run_did(root: Path, name: str, model: str) -> None:
    ended_well(root / name, model)
    own = samples(root / name / model, "held_out.jsonl")
    want = samples(root / name / "run", "eval_held_out_step_2.jsonl")
    assert [record["response"] for record in own] == [record["response"] for record in want]
