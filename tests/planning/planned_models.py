"""Models that plans are made of: the published ones and their sizes, and tiny ones that are really built."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_rl.config.published import published_config

RECIPES = Path(__file__).parents[2] / "recipes"

# As their model cards and safetensors indices give them.
PUBLISHED = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "Qwen3-1.7B": 1_720_574_976,
    # The language model, as transformers builds it from these sizes.
    "Qwen3.5-0.8B": 752_393_024,
    "Qwen3.5-2B": 1_881_825_088,
    "Qwen3.5-4B": 4_205_751_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.6-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3.6-35B-A3B": 34_660_610_688,
    "Qwen3-4B-Base": 4_022_468_096,
    "Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen3-4B-Thinking-2507": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "DeepSeek-V3": 671_026_419_200,
    "Kimi-K2-Instruct": 1_026_408_232_448,
    "GLM-4.5-Air": 106_852_251_264,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Ministral-8B-Instruct-2410": 8_019_808_256,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
}


def model_config(name: str) -> dict[str, Any]:
    config = published_config(name)
    assert config is not None
    return config


# ----------------------------------------------------------------------------------------------------- built for real
def tiny(architecture: str, **other: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8}
    sizes |= {"intermediate_size": 96, "vocab_size": 509, "max_position_embeddings": 512}
    return {"architectures": [architecture], "tie_word_embeddings": False, **sizes, **other}


QWEN3 = tiny("Qwen3ForCausalLM", head_dim=16)
QWEN2_TIED = tiny("Qwen2ForCausalLM", tie_word_embeddings=True)
MOE = tiny(
    "Qwen3MoeForCausalLM",
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
)
STACKED = tiny(
    "GptOssForCausalLM",
    attention_bias=True,
    head_dim=16,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=64,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "truncate": False,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 16,
    },
)
CASES = [
    {"model": QWEN3, "world": 1, "parallel": {}, "dtype": "float32"},
    {"model": QWEN3, "world": 8, "parallel": {"tensor": 2, "pipeline": 2}, "dtype": "bfloat16"},
    {"model": QWEN2_TIED, "world": 8, "parallel": {"pipeline": 4, "virtual_pipeline": 2}, "dtype": "bfloat16"},
    # Chunks of 1, 2, 2 and 2, 2, 1 layers.
    {
        "model": QWEN3 | {"num_hidden_layers": 10},
        "world": 2,
        "parallel": {"pipeline": 2, "virtual_pipeline": 3},
        "dtype": "bfloat16",
    },
    {"model": QWEN3, "world": 6, "parallel": {"pipeline": 3}, "dtype": "bfloat16"},  # 3, 3 and 2 layers
    {"model": QWEN3, "world": 7, "parallel": {"pipeline": 7}, "dtype": "bfloat16"},  # 2 layers, then 1 on each
    {"model": QWEN2_TIED, "world": 4, "parallel": {"tensor": 4, "sequence": True}, "dtype": "bfloat16"},
    {"model": MOE, "world": 8, "parallel": {"expert": 4}, "dtype": "bfloat16"},
    {"model": MOE, "world": 16, "parallel": {"tensor": 2, "pipeline": 2, "expert": 2}, "dtype": "bfloat16"},
    {"model": MOE, "world": 8, "parallel": {"tensor": 4, "expert": 8, "sequence": True}, "dtype": "bfloat16"},
    {"model": MOE, "world": 8, "parallel": {"tensor": 4, "sequence": True}, "dtype": "bfloat16"},
    {"model": MOE, "world": 8, "parallel": {"tensor": 2, "expert": 2, "expert_tensor": 2}, "dtype": "bfloat16"},
    {"model": STACKED, "world": 8, "parallel": {"tensor": 2, "pipeline": 2, "expert": 2}, "dtype": "bfloat16"},
]


def as_case(case: dict[str, Any], content: bool) -> dict[str, Any]:
    """For `tests.planning.counted`."""
    overrides = [f"model.dtype={case['dtype']}", "actor.parallel.tensor=1"]
    overrides += [f"actor.parallel.{key}={str(value).lower()}" for key, value in case["parallel"].items()]
    return {
        "recipe": str(RECIPES / "cpu" / "quickstart.yaml"),
        "overrides": overrides,
        "model": case["model"],
        "world": case["world"],
        "ranks": [0, case["world"] - 1],
        "fused": True,
        "content": content,
    }


def count(cases: list[dict[str, Any]]) -> list[Any]:
    command = [sys.executable, "-m", "tests.planning.counted", json.dumps(cases)]
    root = Path(__file__).parents[2]
    result = subprocess.run(
        command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=3600
    )
    answer = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert answer, result.stderr[-3000:]
    return list(json.loads(answer[0].removeprefix("RESULT ")))
