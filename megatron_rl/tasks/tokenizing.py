"""From prompts to tokens: the chat template's text, and its ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_rl.base.messages import errors_named
from megatron_rl.config.schema import TaskConfig
from megatron_rl.data.sample import Message, Prompt
from megatron_rl.data.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, object]] | None


def tokenize(prompts: Sequence[tuple[Prompt, Tools]], config: TaskConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the prompts; with `chat`, of what the template makes of them and their tools."""
    if config.chat:
        check_template(tokenizer)
        texts = [template_text(tokenizer, as_chat(prompt), tools, config.chat_params) for prompt, tools in prompts]
    else:
        texts = []
        for prompt, _ in prompts:
            if not isinstance(prompt, str):
                raise ValueError("the prompts are chat messages: set chat: true to apply the tokenizer's chat template")
            texts.append(prompt)
    return encode(texts, tokenizer)


def check_template(tokenizer: Tokenizer) -> None:
    """ValueError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
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
