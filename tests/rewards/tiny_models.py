"""Folders of tiny random models: a chat model that speaks characters, and a classifier with one output."""

from __future__ import annotations

import string
from pathlib import Path

CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def chat_model(folder: Path, characters: str = "") -> Path:
    """`characters`: the vocabulary's first."""
    from megatron_rl.config.model import CreateModelConfig
    from megatron_rl.weights.create import create_model

    characters = "".join(dict.fromkeys(characters + string.printable[:95] + "\n"))
    sizes = CreateModelConfig(
        layers=1,
        hidden_size=32,
        heads=1,
        kv_heads=1,
        head_dim=32,
        ffn_size=32,
        vocab_size=128,
        characters=characters,
        max_positions=16384,
    )
    create_model(folder, sizes, seed=0)
    return folder


def classifier(folder: Path, labels: int = 1) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(chat_model(folder))
    tokenizer.chat_template = CHAT_TEMPLATE
    for path in folder.iterdir():
        path.unlink()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        num_labels=labels,
        pad_token_id=0,
        eos_token_id=1,
        dtype="float32",
        initializer_range=0.3,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder


def export_reward_model(source: str, target: str) -> None:
    """What a rank does: the reward model of a folder into another, by way of the actor, as `reward-model` exports it."""
    from megatron.core import parallel_state

    from megatron_rl.actor.reward import RewardActor
    from megatron_rl.checkpoint.convert import open_weights
    from megatron_rl.config.schema import Config
    from megatron_rl.runtime import distributed
    from megatron_rl.weights.export import export_hf

    config = Config(run_dir=target)
    config.model.dtype = "float32"
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=2)
    actor = RewardActor(config, grid, source, open_weights(source))
    export_hf(target, actor.chunks, actor.family, actor.hf_config, actor.parallel, source)
    parallel_state.destroy_model_parallel()
