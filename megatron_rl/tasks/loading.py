"""From a task's config to tokenised samples."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import TaskConfig, TasksConfig
from megatron_rl.names import unknown_name
from megatron_rl.tasks.demonstrations import make_writer
from megatron_rl.tasks.sources import SOURCES, Item
from megatron_rl.tasks.templates import fill

if TYPE_CHECKING:
    from megatron_rl.data import Sample

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class LoadedTasks:
    """All prompts of a run."""

    train: list[Sample]  # every train task's samples, one task after the other; `PromptOrder` shuffles them
    eval: dict[str, list[Sample]]
    excluded: dict[str, int]  # per train task: items left out because an eval task in its `exclude` has the prompt


def load_tasks(tasks: TasksConfig, tokenizer: Any) -> LoadedTasks:
    """Load the eval tasks, then the train tasks without the eval prompts they exclude.

    Raises:
        ValueError: as `load_task`; or an `exclude` that names no eval task.
    """
    evaluation = {name: load_task(name, config, tokenizer) for name, config in tasks.eval.items()}
    train: list[Sample] = []
    excluded = {}
    for name, config in tasks.train.items():
        held_out: set[str] = set()
        for other in config.exclude:
            if other not in evaluation:
                raise ValueError(f"tasks.train.{name}.exclude: {unknown_name('eval task', other, evaluation)}")
            held_out |= {_key(sample.prompt) for sample in evaluation[other]}
        samples, excluded[name] = _load(name, config, tokenizer, held_out)
        train += samples
    return LoadedTasks(train=train, eval=evaluation, excluded=excluded)


def load_task(name: str, config: TaskConfig, tokenizer: Any) -> list[Sample]:
    """Samples of one task, in the source's order, with ids `<name>/<index in the source>`.

    Prompts are tokenised without adding special tokens: the engine is given exactly the tokens of the text, and a model
    that wants a beginning-of-sequence token gets it from its chat template or from the `prompt` template.

    Args:
        name: the task's key in the recipe.
        config: the task. One with `exclude` needs the eval tasks too: `load_tasks`.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ValueError: an item or parameter the source refuses, a template field that does not exist, characters the
            tokenizer does not know, messages without `chat: true`, or no samples at all.
    """
    if config.exclude:
        raise ValueError(f"task {name} excludes prompts of {', '.join(config.exclude)}: load it with load_tasks")
    return _load(name, config, tokenizer, frozenset())[0]


def _load(name: str, config: TaskConfig, tokenizer: Any, held_out: Collection[str]) -> tuple[list[Sample], int]:
    """`load_task` without the held-out prompts, and how many items those were."""
    from megatron_rl.data import Sample

    try:
        with _no_collection():
            kept, excluded = _kept_items(config, held_out)
            token_ids = _tokenize([prompt for _, _, prompt in kept], config.chat, tokenizer)
            samples = [
                Sample(
                    id=f"{name}/{index}",
                    task=name,
                    prompt=prompt,
                    prompt_ids=ids,
                    answer=item.answer,
                    tool_calls=item.tool_calls,
                    needs_response=item.needs_response,
                    metadata=item.metadata,
                )
                for (index, item, prompt), ids in zip(kept, token_ids, strict=True)
            ]
            if config.demonstrations is not None:
                _demonstrate(samples, config)
    except ValueError as error:
        raise ValueError(f"task {name}: {error}") from error
    return samples, excluded


def _kept_items(config: TaskConfig, held_out: Collection[str]) -> tuple[list[tuple[int, Item, Prompt]], int]:
    kept = []
    excluded = 0
    for index, item in enumerate(SOURCES[config.source](config)):
        prompt = _fill_prompt(item, config)
        if held_out and _key(prompt) in held_out:
            excluded += 1
        else:
            kept.append((index, item, prompt))
    if not kept:
        raise ValueError(f"it has no prompts ({excluded} of its items are in the eval tasks it excludes)")
    return kept, excluded


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold Python's cyclic garbage collector: among many live items its passes take longer than making the items."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def filter_by_length(samples: Sequence[Sample], max_prompt_tokens: int, too_long: str) -> tuple[list[Sample], int]:
    """The samples whose prompt fits, and how many were dropped.

    Args:
        samples: samples of one run or task.
        max_prompt_tokens: the longest prompt that fits, in tokens.
        too_long: `error` refuses the first prompt that does not fit, `drop` leaves such prompts out.

    Raises:
        ValueError: a prompt that does not fit under `error`, or none that fits.
    """
    if too_long not in ("error", "drop"):
        raise ValueError(f"rollout.too_long = {too_long!r}, must be error or drop")
    kept = [sample for sample in samples if len(sample.prompt_ids) <= max_prompt_tokens]
    dropped = len(samples) - len(kept)
    if dropped and too_long == "error":
        worst = max(samples, key=lambda sample: len(sample.prompt_ids))
        raise ValueError(
            f"{dropped} of {len(samples)} prompts have more than rollout.max_prompt_tokens = {max_prompt_tokens} "
            f"tokens (the longest, {worst.id}, has {len(worst.prompt_ids)}); raise rollout.max_prompt_tokens, or set "
            "rollout.too_long=drop to leave them out"
        )
    if not kept:
        raise ValueError(f"no prompt has at most rollout.max_prompt_tokens = {max_prompt_tokens} tokens; raise it")
    return kept, dropped


def _key(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else repr(prompt)


def _fill_prompt(item: Item, config: TaskConfig) -> Prompt:
    if isinstance(item.prompt, str):
        if config.prompt == "{prompt}":
            return item.prompt
        return fill(config.prompt, {**item.metadata, "prompt": item.prompt})
    if config.prompt != "{prompt}":
        raise ValueError("a prompt template goes around text; these prompts are chat messages: remove `prompt`")
    return item.prompt


def _tokenize(prompts: Sequence[Prompt], chat: bool, tokenizer: Any) -> list[list[int]]:
    if chat:
        if not tokenizer.chat_template:
            raise ValueError("chat: true needs a tokenizer with a chat template; this one has none")
        texts = [
            tokenizer.apply_chat_template(_messages(prompt), add_generation_prompt=True, tokenize=False)
            for prompt in prompts
        ]
    else:
        texts = []
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise ValueError("the prompts are chat messages: set chat: true to apply the tokenizer's chat template")
            texts.append(prompt)
    try:
        token_ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"the tokenizer cannot encode the prompts: {error}{_unknown(texts, tokenizer)}") from error
    unknown = tokenizer.unk_token_id
    for text, ids in zip(texts, token_ids, strict=True):
        if not ids or (unknown is not None and unknown in ids and (tokenizer.unk_token not in text)):
            raise ValueError(f"the tokenizer cannot encode the prompt {text!r:.200}{_unknown([text], tokenizer)}")
    return list(token_ids)


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _unknown(texts: Iterable[str], tokenizer: Any) -> str:
    vocabulary = tokenizer.get_vocab()
    if max(map(len, vocabulary), default=0) > 1 and len(vocabulary) > 1000:
        return ""  # not a character tokenizer: its vocabulary says nothing about single characters
    missing = sorted({character for text in texts for character in text} - vocabulary.keys())
    return f"; characters it does not know: {' '.join(map(repr, missing))}" if missing else ""


def _demonstrate(samples: list[Sample], config: TaskConfig) -> None:
    assert config.demonstrations is not None
    write = make_writer(config.demonstrations, config.demonstration_params)
    for sample in samples:
        own = {"prompt": sample.prompt, "answer": sample.answer, config.answer_key: sample.answer}
        try:
            sample.demonstration = write(sample.id, {**sample.metadata, **own})
        except ValueError as error:
            raise ValueError(f"demonstration of {sample.id}: {error}") from error
