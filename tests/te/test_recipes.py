"""Every recipe that names a GPU builds with Transformer Engine: configuration, FP8 recipe, model, buffers and optimizer."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.published import published_config
from tests.recipes.shipped import loaded, nodes, runnable
from tests.te.processes import spawn
from tests.te.recipes import build_configurations, build_stages, build_with_deepep

Case = tuple[str, int, dict[str, Any], dict[str, Any]]  # recipe, GPUs, its `actor`, the model's config.json


@functools.cache
def _cases() -> list[Case]:
    cases = list[Case]()
    for name in runnable():
        config = loaded(name)
        if config.model.path is None:
            continue
        model = published_config(Path(config.model.path).name)
        assert model is not None, name
        cases.append((name, 8 * nodes(name), dataclasses.asdict(config.actor), model))
    return cases


def _layouts() -> dict[tuple[int, str, str], str]:
    """Those that differ in more than numbers of tokens or of the optimizer, with a small model, and a recipe of each."""
    found: dict[tuple[int, str, str], str] = {}
    for name, world, actor, model in _cases():
        kept = {
            key: value for key, value in actor.items() if key not in ("optimizer", "tokens_per_microbatch", "offload")
        }
        small = _small(model, actor["parallel"]["pipeline"] * actor["parallel"]["virtual_pipeline"])
        found.setdefault((world, json.dumps(kept), json.dumps(small)), name)
    return found


def _small(config: dict[str, Any], chunks: int) -> dict[str, Any]:
    """The model with a layer per chunk and narrow matrices, but for what must divide over ranks."""
    if "text_config" in config:
        tower = {"depth": 1, "out_hidden_size": 256, "deepstack_visual_indexes": [0]}
        decoder = {
            **_small(config["text_config"], chunks),
            "rope_scaling": config["text_config"]["rope_scaling"].copy(),
        }
        decoder["rope_scaling"]["mrope_section"] = [6, 5, 5]
        return {**config, "text_config": decoder, "vision_config": {**config["vision_config"], **tower}}
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 32,
        "head_dim": 32,
        "vocab_size": 512,
    }
    sizes |= {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": chunks,
        "max_position_embeddings": 4096,
    }
    kept = (
        "architectures",
        "model_type",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
        "tie_word_embeddings",
    )
    sizes |= {"rope_theta": 10000, "rms_norm_eps": 1e-6}
    kept += ("hidden_act",)
    if config["model_type"] == "gpt_oss":
        kept += ("num_local_experts", "attention_bias", "sliding_window", "rope_scaling")
    if config["model_type"] == "glm4_moe":
        kept += ("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace")
        kept += ("routed_scaling_factor", "attention_bias", "partial_rotary_factor", "use_qk_norm")
    if config["model_type"] == "deepseek_v3":
        kept += (
            "n_routed_experts",
            "n_shared_experts",
            "n_group",
            "topk_group",
            "first_k_dense_replace",
            "topk_method",
        )
        kept += ("scoring_func", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "vision_config" in config:
        sizes["vision_config"] = {**config["vision_config"], "depth": 1, "out_hidden_size": sizes["hidden_size"]}
        sizes["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    return {key: sizes.get(key, value) for key, value in config.items() if key in (*kept, *sizes)}


def test_configurations_build() -> None:
    names = [name for name, *_ in _cases()]
    assert {"scale/qwen3-235b-a22b-fp8.yaml", "scale/qwen3-8b.yaml"} <= set(names)
    spawn(build_configurations, 1, json.dumps([(actor, model) for _, _, actor, model in _cases()]))


@pytest.mark.parametrize(("world", "actor", "small"), [pytest.param(*key, id=name) for key, name in _layouts().items()])
def test_models_and_optimizers_build(world: int, actor: str, small: str) -> None:
    spawn(build_stages, 1, world, actor, small)


def test_deepep_builds() -> None:
    [layout] = [
        key for key, name in _layouts().items() if re.match(r"scale/qwen3-235b-a22b(-fp8-rollouts)?\.yaml", name)
    ]
    spawn(build_with_deepep, 1, *layout)
