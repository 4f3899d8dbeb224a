"""A tiny Qwen2.5-VL or Qwen3-VL, prompts with drawn images, and what `transformers` makes of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from megatron_rl.data.batch import TokenBatch
from megatron_rl.data.images import ImageReader
from megatron_rl.models import model_of, read_hf_config

PAD, EOS, START, IMAGE, END, VIDEO = range(6)


# kind -> (transformers' configuration and model, the text's own, the tower's own)
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": {"mrope_section": [4, 6, 6]}},
        {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    # Four pairs of time after those that take turns; more positions than any picture here has rows, and fewer.
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": {"mrope_section": [8, 4, 4], "mrope_interleaved": True}, "head_dim": 32},
        {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 25},
    ),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
_, _, _OF_TEXT, _OF_TOWER = KINDS["qwen3_vl"]
KINDS["qwen3_vl_moe"] = (
    "Qwen3VLMoeConfig",
    "Qwen3VLMoeForConditionalGeneration",
    {**_OF_TEXT, **_EXPERTS},
    _OF_TOWER,
)


def configuration(kind: str, tied: bool = False, **sizes: Any) -> Any:
    """transformers' configuration of a kind; `sizes`: of its text model."""
    text = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "rope_parameters": {"rope_theta": 100.0},
        **sizes,
    }
    vision = {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": text["hidden_size"],
    }
    names = ("vision_start", "image", "vision_end", "video")
    tokens = {f"{name}_token_id": number for number, name in enumerate(names, START)}
    return _of_kind(kind, text, vision, {**tokens, "tie_word_embeddings": tied})


def write(
    folder: Path, tied: bool = False, layers: int = 4, kind: str = "qwen2_5_vl", seed: int = 0, **sizes: Any
) -> Path:
    """A model folder with random values in every tensor, and the image processor's settings."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    _save(folder, kind, configuration(kind, tied, **{"num_hidden_layers": layers, **sizes}), seed)
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024).save_pretrained(folder)
    return folder


def replace_model(folder: Path, kind: str) -> None:
    """Puts one of this kind into the place of a created Qwen2.5-VL, with its sizes, tokenizer and image processor."""
    created = json.loads((folder / "config.json").read_text())
    text, tower = created["text_config"], created["vision_config"]
    numbers = {name: value for name, value in text.items() if type(value) is int}
    text = {**numbers, "rope_parameters": {"rope_theta": text["rope_parameters"]["rope_theta"]}}
    sizes = ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "out_hidden_size")
    tower = {name: tower[name] for name in sizes}
    common = {name: value for name, value in created.items() if name.endswith("token_id") or name.startswith("tie")}
    _save(folder, kind, _of_kind(kind, text, tower, common))


def _of_kind(kind: str, text: dict[str, Any], tower: dict[str, Any], common: dict[str, Any]) -> Any:
    import transformers

    config_class, _, of_text, of_tower = KINDS[kind]
    rope = {"rope_type": "default", **text["rope_parameters"], **of_text["rope_parameters"]}
    return getattr(transformers, config_class)(
        text_config={**text, **of_text, "rope_parameters": rope},
        vision_config={**tower, **of_tower},
        **common,
        dtype="float32",
    )


def _save(folder: Path, kind: str, config: Any, seed: int = 0) -> None:
    import transformers

    _, model_class, of_text, _ = KINDS[kind]
    model = getattr(transformers, model_class)(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and ("norm" in key or "ln_q" in key) and not key.endswith("bias")
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.1 * noise)
    model.save_pretrained(folder)
    if "num_experts" in of_text:
        transpose_experts(folder)


def transpose_experts(folder: Path) -> None:
    """Experts as published files have them, [experts, in, out], where transformers has saved [experts, out, in]; or back."""
    file = folder / "model.safetensors"
    tensors = {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def picture(width: int, height: int, seed: int) -> bytes:
    """A PNG of noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def batch(folder: Path) -> TokenBatch:
    """Images of several sizes, two in one prompt, one prompt twice, and a prompt without."""
    vision = model_of(read_hf_config(folder)).description.vision
    assert vision is not None
    reader = ImageReader(folder, vision)
    marked = [START, IMAGE, END]
    prompts = [
        ([7, 8, *marked, 9], [picture(40, 24, 0)]),
        ([10, 11, 12], []),
        ([*marked, *marked, 13, 14], [picture(16, 32, 1), picture(61, 17, 2)]),
    ]
    placed = [reader.place(ids, sources) if sources else (ids, None) for ids, sources in prompts]
    placed.append(placed[0])
    responses = [[20, 21, 22], [23, 24], [25, 26, 27, 28], [29, 30, IMAGE, 31]]
    return TokenBatch.continuations(
        [(ids, response) for (ids, _), response in zip(placed, responses, strict=True)], [own for _, own in placed]
    )


def expected(
    folder: Path, sequences: TokenBatch, gradients: bool = False
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """`transformers`' log-probs of the scored tokens of each sequence, and the gradients of their sum."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = scores(model, sequences)
    if not gradients:
        return [own.detach() for own in found], {}
    torch.cat(found).sum().backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return [own.detach() for own in found], named


def scores(model: Any, sequences: TokenBatch) -> list[torch.Tensor]:
    """Log-probs of the scored tokens of each sequence, by transformers' model."""
    found = []
    for row, tokens in sequences.tokens.items():
        ids = torch.as_tensor(tokens)[None]
        embeds, inputs = model.get_input_embeddings()(ids), dict[str, Any]()
        if (images := sequences.images.get(row)) is not None:
            kinds = torch.zeros_like(ids, dtype=torch.int)
            kinds[0, images.slots] = 1
            # Where the response has an image token, it is text: transformers would look for an image.
            features = model.model.get_image_features(torch.as_tensor(images.pixels()), torch.as_tensor(images.grids))
            slots = torch.as_tensor(images.slots)
            embeds = embeds.index_copy(1, slots, torch.cat(features.pooler_output)[None])
            inputs["position_ids"], _ = model.model.get_rope_index(
                ids, kinds, image_grid_thw=torch.as_tensor(images.grids)
            )
            if "deepstack_features" in features:
                deep = [torch.cat(level) for level in features.deepstack_features]
                inputs |= {"visual_pos_masks": kinds == 1, "deepstack_visual_embeds": deep}
        hidden = model.model.language_model(inputs_embeds=embeds, **inputs).last_hidden_state
        logits = model.lm_head(hidden)[0].log_softmax(-1)
        scored = torch.as_tensor(sequences.loss_mask[row]).nonzero()[:, 0]
        found.append(logits[scored - 1, ids[0, scored]])
    return found
