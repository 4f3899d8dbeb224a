"""From prompts to tokens: the chat template's text, and its ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_rl.base import shipped
from megatron_rl.base.messages import errors_named
from megatron_rl.base.plugins import read_text
from megatron_rl.config.schema import TaskConfig
from megatron_rl.data.sample import Message, Prompt
from megatron_rl.data.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, object]] | None
_LONGEST_TEMPLATE = 2**20  # bytes


def tokenize(prompts: Sequence[tuple[Prompt, Tools]], config: TaskConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the prompts; with `chat`, of what the template makes of them and their tools."""
    if config.chat:
        check_template(tokenizer, config.chat_template)
        params = template_params(config)
        texts = [template_text(tokenizer, as_chat(prompt), tools, params) for prompt, tools in prompts]
    else:
        texts = []
        for prompt, _ in prompts:
            if not isinstance(prompt, str):
                raise ValueError("the prompts are chat messages: set chat: true to apply the tokenizer's chat template")
            texts.append(prompt)
    return encode(texts, tokenizer)


def template_params(config: TaskConfig) -> dict[str, object]:
    """Returns a task's arguments of `apply_chat_template`: its `chat_params`, and the text of its `chat_template`.

    Raises:
        ValueError: the file cannot be read.
    """
    if config.chat_template is None:
        return dict(config.chat_params)
    with errors_named(f"chat_template: cannot read {config.chat_template}", OSError, ValueError):
        text = read_text(shipped.find_file(Path(config.chat_template)), _LONGEST_TEMPLATE)
    return {**config.chat_params, "chat_template": text}


def check_template(tokenizer: Tokenizer, given: object = None) -> None:
    """ValueError for a tokenizer without a chat template, where none is `given`."""
    if not (given or tokenizer.chat_template):
        raise ValueError("chat: true needs a tokenizer with a chat template; this one has none")


def as_chat(prompt: Prompt) -> list[Message]:
    """A prompt's messages: those of a chat, or a text as the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def template_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Tools,
    params: Mapping[str, object],
    add_generation_prompt: bool = True,
) -> str:
    """The text that the chat template makes of messages, with the beginning of the model's turn behind them."""
    from jinja2 import TemplateError

    # What templates raise on messages they do not take.
    with errors_named(f"the chat template refuses the prompt {messages!r:.200}", TemplateError, TypeError, ValueError):
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **params
            )
        )


def encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of texts, special tokens among them, none added.

    Raises:
        ValueError: one that the tokenizer cannot encode, or has no tokens for.
    """
    try:
        token_ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"the tokenizer cannot encode the prompts: {error}{_unknown(texts, tokenizer)}") from error
    for text, ids in zip(texts, token_ids, strict=True):
        refuse_unknown(text, ids, tokenizer)
    return list(token_ids)


def refuse_unknown(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """ValueError for a text that has no tokens, or one that stands for what the tokenizer does not know."""
    unknown = tokenizer.unk_token_id
    if not ids or (unknown is not None and unknown in ids and (tokenizer.unk_token not in text)):
        raise ValueError(f"the tokenizer cannot encode the prompt {text!r:.200}{_unknown([text], tokenizer)}")


def _unknown(texts: Iterable[str], tokenizer: Tokenizer) -> str:
    vocabulary = tokenizer.get_vocab()
    if max(map(len, vocabulary), default=0) > 1 and len(vocabulary) > 1000:
        return ""  # not a character tokenizer: its vocabulary says nothing about single characters
    missing = sorted({character for text in texts for character in text} - vocabulary.keys())
    return f"; characters it does not know: {' '.join(map(repr, missing))}" if missing else ""
