"""A tiny Qwen2.5-VL, prompts with drawn images, and what `transformers` makes of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from megatron_rl.data.batch import TokenBatch
from megatron_rl.data.images import ImageReader
from megatron_rl.models import model_of, read_hf_config

PAD, EOS, START, IMAGE, END, VIDEO = range(6)


def write(folder: Path, tied: bool = False, layers: int = 4) -> Path:
    """A model folder with random values in every tensor, and the image processor's settings."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    }
    names = ("vision_start", "image", "vision_end", "video")
    tokens = {f"{name}_token_id": number for number, name in enumerate(names, START)}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **tokens, tie_word_embeddings=tied, dtype="float32"
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in key or "ln_q" in key else 0.1 * noise)
    model.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024).save_pretrained(folder)
    return folder


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
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
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
        ids, inputs = torch.as_tensor(tokens)[None], {}
        if (images := sequences.images.get(row)) is not None:
            kinds = torch.zeros_like(ids, dtype=torch.int)
            kinds[0, images.slots] = 1
            # Where the response has an image token, it is text: transformers would look for an image.
            features = model.model.get_image_features(
                torch.as_tensor(images.pixels()), torch.as_tensor(images.grids)
            ).pooler_output
            embeds = model.get_input_embeddings()(ids).index_copy(
                1, torch.as_tensor(images.slots), torch.cat(features)[None]
            )
            positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=torch.as_tensor(images.grids))
            inputs = {"inputs_embeds": embeds, "position_ids": positions}
        else:
            inputs = {"input_ids": ids}
        logits = model(**inputs).logits[0].log_softmax(-1)
        scored = torch.as_tensor(sequences.loss_mask[row]).nonzero()[:, 0]
        found.append(logits[scored - 1, ids[0, scored]])
    return found
