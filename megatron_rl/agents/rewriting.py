"""Says to the author of a recipe where a chat template rewrites earlier turns of a conversation."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.agents.registry import agent_tasks
from megatron_rl.agents.rendering import Renderer
from megatron_rl.config.schema import Config
from megatron_rl.data.tokenizer import Tokenizer


def rewritten_turns(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields a sentence per task with an agent whose template writes earlier turns otherwise than the model did."""
    for key, task in agent_tasks(config).items():
        if (said := Renderer(tokenizer, task.chat_params).rewrites()) is not None:
            yield f"{key}: by the chat template, {said}. Conversations go on with what the model saw and wrote"


def rewritten_turns_of_folder(config: Config) -> list[str]:
    """`rewritten_turns` by the tokenizer in `model.path`; [] where no folder is named, or transformers is not installed."""
    path = config.model.path
    if (
        path is None
        or not agent_tasks(config)
        or not Path(path).is_dir()
        or not importlib.util.find_spec("transformers")
    ):
        return []
    from transformers import AutoTokenizer

    return list(rewritten_turns(config, AutoTokenizer.from_pretrained(path, trust_remote_code=False)))
