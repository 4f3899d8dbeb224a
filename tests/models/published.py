"""Tiny models of Qwen3.5 in the shape of its published files: with a vision tower, layers that predict further tokens, and
the experts of a layer in one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import tiny

TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
WORDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def write(folder: Path, variant: str, **changes: Any) -> Path:
    """A folder as `tiny.write` makes it, with the same values, around which transformers puts the rest."""
    import transformers

    tiny.write(folder, variant, **changes)
    text = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = text.config.to_dict()
    config["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    name = type(text).__name__.removesuffix("ForCausalLM")
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(
        getattr(transformers, f"{name}Config")(
            text_config=config,
            vision_config={**TOWER, "out_hidden_size": config["hidden_size"]},
            tie_word_embeddings=config["tie_word_embeddings"],
            **dict(zip(WORDS, range(2, 6), strict=True)),
        )
    )
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder)
    _restack(folder / "model.safetensors", config)
    return folder


def _restack(file: Path, config: dict[str, Any]) -> None:
    """Experts as published, which transformers 5.19 reads but does not write, and a layer that predicts."""
    weights = load_file(file)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        if f"{prefix}.0.gate_proj.weight" in weights:
            gate, up, down = (
                torch.stack(
                    [weights.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(config["num_experts"])]
                )
                for part in ("gate", "up", "down")
            )
            weights[f"{prefix}.gate_up_proj"], weights[f"{prefix}.down_proj"] = torch.cat([gate, up], 1), down
    weights["mtp.layers.0.input_layernorm.weight"] = torch.zeros(config["hidden_size"])
    save_file(weights, file, {"format": "pt"})
