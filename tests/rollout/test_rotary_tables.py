"""vLLM turns queries and keys by the angles that the actor turns them by, for every scaling."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.model import ModelConfig, RopeScalingConfig
from megatron_rl.config.published import published_config
from megatron_rl.config.schema import Config
from megatron_rl.models import HFConfig, model_of
from megatron_rl.modules.rotary import inverse_frequencies
from megatron_rl.rollout.vllm_engine import llm_options
from megatron_rl.seams.vllm import unquantised

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10240}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**YARN, "rope_type": "llama3", "low_freq_factor": 0.5, "high_freq_factor": 3.0},
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 2.0},
    "yarn, attention factor": {**YARN, "attention_factor": 0.8},
}


def table(hf_config: HFConfig) -> torch.Tensor:
    """vLLM's cosines and sines, float32 [positions, dimensions of a head]."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            128, hf_config["max_position_embeddings"], rope_parameters=hf_config["rope_parameters"], dtype=torch.float32
        )
    found: torch.Tensor = rope.cos_sin_cache
    return found


@pytest.mark.parametrize("name", SCALINGS)
def test_its_table_has_the_actors_angles(name: str) -> None:
    published = published_config("Qwen3-8B")
    assert published is not None
    hf_config = {**published, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e6, **SCALINGS[name]}}
    description = model_of(hf_config).description
    rope, positions = description.rope, torch.arange(description.max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, 128))
    expected = torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor
    found = table(hf_config)
    assert len(found) >= description.max_positions == 40960
    assert torch.equal(found[: description.max_positions], expected)


def test_the_recipes_scaling_is_given_to_vllm_as_a_whole() -> None:
    published = published_config("Qwen3-32B")
    assert published is not None
    scaling = RopeScalingConfig(factor=4.0, original_max_position_embeddings=32768, beta_fast=30.0)
    config = Config(run_dir="run", model=ModelConfig(path="any", rope_scaling=scaling))
    config.rollout.max_prompt_tokens, config.rollout.max_tokens = 4096, 126976
    hf_config = config.model.completed(published)
    options = llm_options(config, "any", hf_config, model_of(hf_config))
    assert options["max_model_len"] == options["hf_overrides"]["max_position_embeddings"] == 131072
    assert options["hf_overrides"]["rope_parameters"] == {**hf_config["rope_scaling"], "rope_theta": 1000000.0}
    assert hf_config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 30.0,
    }


@pytest.mark.parametrize(("name", "share"), [("Qwen3.5-35B-A3B", 0.25), ("GLM-4.5-Air", 0.5)])
def test_vllm_is_told_which_part_of_a_head_turns(name: str, share: float) -> None:
    published = published_config(name)
    assert published is not None
    positions = published["max_position_embeddings"]
    assert isinstance(positions, int)
    scaling = RopeScalingConfig(factor=4.0, original_max_position_embeddings=positions, attention_factor=1.0)
    config = Config(run_dir="run", model=ModelConfig(path="any", rope_scaling=scaling))
    hf_config = config.model.completed(published)
    rope = llm_options(config, "any", hf_config, model_of(hf_config))["hf_overrides"]["rope_parameters"]
    assert rope["partial_rotary_factor"] == share
    assert rope["rope_theta"] == model_of(published).description.rope.theta


def test_a_quantised_folder_gets_the_recipes_scaling_too(tmp_path: Path) -> None:
    from transformers import Qwen3Config
    from vllm.transformers_utils.config import get_config

    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    Qwen3Config(architectures=["Qwen3ForCausalLM"], quantization_config=quantised).save_pretrained(tmp_path)
    changes = {"rope_parameters": {**YARN, "rope_theta": 1e6}, "max_position_embeddings": 40960}
    config = get_config(tmp_path, False, hf_overrides_fn=partial(unquantised, changes=changes))
    assert not hasattr(config, "quantization_config")
    assert {name: getattr(config, name) for name in changes} == changes
