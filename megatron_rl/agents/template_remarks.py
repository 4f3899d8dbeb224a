"""Says to the author of a recipe what a chat template does to conversations: it rewrites earlier turns, or has calls written
in a format that the task's parser does not read."""

from __future__ import annotations

import importlib.util
import typing
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.agents.registry import agent_tasks
from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.replies import read_reply
from megatron_rl.base.messages import ConfigError, errors_named
from megatron_rl.config.schema import Config
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards.tool_parsers import ParserName
from megatron_rl.tasks.tokenizing import template_params


def template_remarks(config: Config, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields sentences about the tasks that have an agent."""
    for key, task in agent_tasks(config).items():
        assert task.agent is not None
        renderer = Renderer(tokenizer, template_params(task))
        if (remark := renderer.rewrites()) is not None:
            then = "the next turn begins a sequence there"
            if task.agent.history == "kept":
                then = f"conversations go on with what the model saw and wrote (with `{key}.agent.history` rendered, {then})"
            yield f"{key}: by the chat template, {remark}; {then}"
        if (remark := unread_calls(renderer, task.agent.parser, task.agent.name == "tools")) is not None:
            yield f"{key}.agent.parser: {remark}"


def template_remarks_of_folder(config: Config) -> list[str]:
    """`template_remarks` by the tokenizer in `model.path`; [] where no folder is named, or transformers is not installed.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    path = config.model.path
    if (
        path is None
        or not agent_tasks(config)
        or not Path(path).is_dir()
        or not importlib.util.find_spec("transformers")
    ):
        return []
    from transformers import AutoTokenizer

    with errors_named(
        f"`model.path`: the tokenizer in {path} cannot be read", OSError, ValueError, as_error=ConfigError
    ):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return list(template_remarks(config, tokenizer))


def unread_calls(renderer: Renderer, parser: str, wants_calls: bool) -> str | None:
    """Why a turn's calls would not be read if the model writes them as its chat template does, and what to do, in words.

    None: they are, the template writes none, or the prompts and not the template say how (`toolrl`).

    Args:
        parser: of the task.
        wants_calls: the agent makes calls, so that `none` is a mistake.
    """
    written = renderer.written_call()
    if written is None or parser == "toolrl" or (parser == "none" and not wants_calls):
        return None
    readers = [name for name in typing.get_args(ParserName) if _reads(name, written)]
    if parser in readers:
        return None
    remedy = f"`{readers[0]}` does" if readers else "no parser does, so its calls stay in the text"
    return f"`{parser}` does not read calls as the chat template has them written, {written!r}; {remedy}"


def _reads(parser: ParserName, written: str) -> bool:
    return "tool_calls" in read_reply(written, "stop", parser, 0).message
