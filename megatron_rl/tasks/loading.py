"""From a task's config to tokenised samples, no longer than the recipe allows."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megatron_rl.base.messages import errors_named
from megatron_rl.config.schema import Config, TaskConfig, TasksConfig
from megatron_rl.data.images import ImageReader, Source, fingerprint
from megatron_rl.data.sample import Prompt, Sample
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.tasks.demonstrations import make_writer
from megatron_rl.tasks.image_placeholders import mark_images, place_images
from megatron_rl.tasks.row_mapping import Item
from megatron_rl.tasks.sources import SPLIT, items_of
from megatron_rl.tasks.templates import fill
from megatron_rl.tasks.tokenizing import tokenize


@dataclass(frozen=True)
class Prompts:
    """All prompts of a run."""

    train: list[Sample]  # every train task's samples, one task after the other; the prompt order mixes them
    eval: dict[str, list[Sample]]
    weights: dict[str, float] | None  # of the train tasks; None: mixed by size
    reader: ImageReader | None = None  # of the images in them; None: the model reads text only

    @property
    def everything(self) -> list[list[Sample]]:
        return [self.train, *self.eval.values()]

    @property
    def train_by_id(self) -> dict[str, Sample]:
        return {sample.id: sample for sample in self.train}

    @property
    def images(self) -> tuple[int, ImageReader] | None:
        """How many images a prompt has at most, and what reads them; None: the model reads text only."""
        if self.reader is None:
            return None
        every = (sample.images for samples in self.everything for sample in samples)
        return max((len(images.sources) for images in every if images is not None), default=1), self.reader


def tasks_to_evaluate(tasks: TasksConfig) -> TasksConfig:
    """The tasks that an evaluation reads: the eval tasks, and the train tasks that a `split` takes its prompts from."""
    sources = {config.of for config in tasks.eval.values() if config.source == SPLIT}
    return replace(tasks, train={name: config for name, config in tasks.train.items() if name in sources})


def load_tasks(tasks: TasksConfig, tokenizer: Tokenizer, reader: ImageReader | None = None) -> Prompts:
    """Loads (checked) eval tasks, train tasks without the eval prompts they exclude, and what is held out of those.

    `reader`: of images, where the model reads them.

    Raises:
        ValueError: as `load_task`.
    """
    evaluation = {
        name: load_task(name, config, tokenizer, reader)
        for name, config in tasks.eval.items()
        if config.source != SPLIT
    }
    train: dict[str, list[Sample]] = {}
    for name, config in tasks.train.items():
        held_out = {_key_of(sample) for other in config.exclude for sample in evaluation[other]}
        train[name] = _load(name, config, tokenizer, held_out, reader)
    for name, config in tasks.eval.items():
        if config.source == SPLIT:
            source = config.of or ""
            evaluation[name], train[source] = hold_out(name, config, train[source])
    return Prompts(
        train=[sample for samples in train.values() for sample in samples],
        eval={name: evaluation[name] for name in tasks.eval},
        weights=task_weights(tasks.train),
        reader=reader,
    )


def task_weights(train: Mapping[str, TaskConfig]) -> dict[str, float] | None:
    """The train tasks' weights, None where they have none. ValueError where only some have one."""
    weights = {name: config.weight for name, config in train.items() if config.weight is not None}
    if weights and (without := train.keys() - weights.keys()):
        raise ValueError(f"tasks.train.{min(without)}.weight: is missing; give every train task a weight, or none")
    return weights or None


def hold_out(name: str, config: TaskConfig, samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """A train task's samples in two: those held out, as task `name`, and those left.

    Distinct prompts are drawn, and every sample with a drawn prompt leaves the training: the two parts have no prompt in
    common. The drawing depends on the seed and the prompts, not on their order.

    Raises:
        ValueError: no prompt would be held out, or none left to train on.
    """
    assert config.hold_out is not None
    prompts = sorted({_key_of(sample) for sample in samples})
    count = round(config.hold_out * len(prompts)) if config.hold_out < 1 else int(config.hold_out)
    if not 1 <= count < len(prompts):
        raise ValueError(
            f"task {name}: hold_out = {config.hold_out:g} is {count} of the {len(prompts)} different prompts of "
            f"{config.of}; at least one must be held out, and at least one left"
        )
    drawn = set(random.Random(f"held out, seed {config.seed}").sample(prompts, count))
    held_out: dict[str, Sample] = {}
    remaining = []
    for sample in samples:
        key = _key_of(sample)
        if key not in drawn:
            remaining.append(sample)
        elif key not in held_out:
            index = sample.id.rpartition("/")[2]
            held_out[key] = replace(sample, id=f"{name}/{index}", task=name)
    return list(held_out.values()), remaining


def load_task(name: str, config: TaskConfig, tokenizer: Tokenizer, reader: ImageReader | None = None) -> list[Sample]:
    """Samples of one task, in the source's order, with ids `<name>/<index in the source>`.

    Prompts are tokenised without special tokens: the engine gets exactly the tokens of the text, and a beginning-of-sequence
    token comes from the chat template or the `prompt` template.

    A task with `exclude` needs the eval tasks too: `load_tasks`.

    Raises:
        ValueError: an item or parameter the source refuses, a template field that does not exist, characters the
            tokenizer does not know, messages without `chat: true`, an image that cannot be read, or no samples at all.
    """
    if config.source == SPLIT:
        raise ValueError(f"task {name} is part of the train task {config.of}: load it with load_tasks")
    if config.exclude:
        raise ValueError(f"task {name} excludes prompts of {', '.join(config.exclude)}: load it with load_tasks")
    return _load(name, config, tokenizer, frozenset(), reader)


def _load(
    name: str, config: TaskConfig, tokenizer: Tokenizer, held_out: Collection[str], reader: ImageReader | None
) -> list[Sample]:
    """`load_task` without the held-out prompts."""
    with errors_named(f"task {name}"), _no_collection():
        items = _kept_items(config, held_out)
        texts = [mark_images(prompt, item.images, reader) for _, item, prompt in items]
        tools = [item.tools if item.tools is not None else config.tools or None for _, item, _ in items]
        token_ids = tokenize(list(zip(texts, tools, strict=True)), config, tokenizer)
        placed = [
            place_images(f"{name}/{index}", ids, item.images, reader)
            for (index, item, _), ids in zip(items, token_ids, strict=True)
        ]
        samples = [
            Sample(
                id=f"{name}/{index}",
                task=name,
                prompt=prompt,
                prompt_ids=ids,
                answer=item.answer,
                tool_calls=item.tool_calls,
                needs_response=item.needs_response,
                metadata=item.metadata if offered is None else {**item.metadata, "tools": offered},
                images=images,
                agent=name if config.agent is not None else None,
            )
            for (index, item, prompt), offered, (ids, images) in zip(items, tools, placed, strict=True)
        ]
        if config.demonstrations is not None:
            _demonstrate(samples, config)
    return samples


def _kept_items(config: TaskConfig, held_out: Collection[str]) -> list[tuple[int, Item, Prompt]]:
    items = [(index, item, fill_prompt(item, config)) for index, item in enumerate(items_of(config))]
    kept = [entry for entry in items if not held_out or _key(entry[2], entry[1].images) not in held_out]
    if not kept:
        raise ValueError(f"it has no prompts ({len(items)} of its items are in the eval tasks it excludes)")
    return kept


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pauses Python's cyclic garbage collector: with many live objects its passes take longer than making the items."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def filter_by_length(samples: Sequence[Sample], max_prompt_tokens: int, too_long: str) -> tuple[list[Sample], int]:
    """The samples whose prompt fits, and how many were dropped. `too_long`: `error` or `drop`, as `rollout.too_long`.

    Raises:
        ValueError: a prompt that does not fit under `error`, or none that fits.
    """
    short_enough = [sample for sample in samples if len(sample.prompt_ids) <= max_prompt_tokens]
    dropped = len(samples) - len(short_enough)
    if dropped and too_long == "error":
        worst = max(samples, key=lambda sample: len(sample.prompt_ids))
        raise ValueError(
            f"{dropped} of {len(samples)} prompts have more than rollout.max_prompt_tokens = {max_prompt_tokens} "
            f"tokens (the longest, {worst.id}, has {len(worst.prompt_ids)}); raise rollout.max_prompt_tokens, or set "
            "rollout.too_long=drop to leave them out"
        )
    if not short_enough:
        raise ValueError(f"no prompt has at most rollout.max_prompt_tokens = {max_prompt_tokens} tokens; raise it")
    return short_enough, dropped


def _key(prompt: Prompt, images: Sequence[Source]) -> str:
    """Equal for equal prompts: the order of a message's keys, which differs between sources, does not matter."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return f"{text} {fingerprint(images)}" if images else text


def _key_of(sample: Sample) -> str:
    return _key(sample.prompt, sample.images.sources if sample.images is not None else ())


def fill_prompt(item: Item, config: TaskConfig) -> Prompt:
    """The item's prompt in its task's template. ValueError where the template does not go with it."""
    if isinstance(item.prompt, str):
        if config.prompt == "{prompt}":
            return item.prompt
        return fill(config.prompt, {**item.metadata, "prompt": item.prompt})
    if config.prompt != "{prompt}":
        raise ValueError("a prompt template goes around text; these prompts are chat messages: remove `prompt`")
    return item.prompt


def _demonstrate(samples: list[Sample], config: TaskConfig) -> None:
    assert config.demonstrations is not None
    write = make_writer(config.demonstrations, config.demonstration_params)
    for sample in samples:
        parameters = {
            "prompt": sample.prompt,
            "tool_calls": sample.tool_calls,
            "answer": sample.answer,
            config.columns.answer: sample.answer,
        }
        with errors_named(f"demonstration of {sample.id}"):
            sample.demonstration = write(sample.id, {**sample.metadata, **parameters})


def load_prompts(
    config: Config,
    tokenizer: Tokenizer,
    note: Callable[[str], None],
    training: bool,
    reader: ImageReader | None = None,
) -> Prompts:
    """Loads and tokenises the recipe's tasks; at most `trainer.eval_max_prompts` of each eval task.

    Args:
        note: called with a sentence for every task of which prompts are left out.
        training: False: train tasks are read only where a `split` takes eval prompts from them.
        reader: of images, where the model reads them.

    Raises:
        ValueError: an empty task, or prompts that are too long.
    """
    limit, too_long = config.rollout.max_prompt_tokens, config.rollout.too_long
    tasks = load_tasks(config.tasks if training else tasks_to_evaluate(config.tasks), tokenizer, reader)

    def fitting(samples: list[Sample], what: str) -> list[Sample]:
        kept, dropped = filter_by_length(samples, limit, too_long)
        if dropped:
            note(f"left out {dropped} {what} of more than {limit} tokens")
        return kept

    train = fitting(tasks.train, "training prompts") if training else []
    most = config.trainer.eval_max_prompts
    held_out = {name: fitting(samples, f"prompts of {name}")[:most] for name, samples in tasks.eval.items()}
    return Prompts(train, held_out, tasks.weights if training else None, reader)


def check_demonstrations(samples: Sequence[Sample], tokenizer: Tokenizer, limit: int) -> None:
    """Looks for demonstrations that are too long, before the model is loaded. Only texts that may be are tokenised; how long
    conversations are is seen when the training begins.

    Raises:
        ValueError: one has more than `limit` tokens, with the end-of-sequence token behind it.
    """
    texts = {sample.id: sample.demonstration for sample in samples if isinstance(sample.demonstration, str)}
    long = {name: text for name, text in texts.items() if len(text.encode(errors="replace")) + 1 > limit}
    if long:
        encoded = tokenizer(list(long.values()), add_special_tokens=False)["input_ids"]
        refuse_long([sample for sample in samples if sample.id in long], [len(ids) + 1 for ids in encoded], limit)


def refuse_long(samples: Sequence[Sample], lengths: Sequence[int], limit: int) -> None:
    """Raises ValueError where a demonstration has more tokens than the model may write in a rollout."""
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    if lengths[longest] > limit:
        raise ValueError(
            f"the demonstration of {samples[longest].id} has {lengths[longest]} tokens, more than rollout.max_tokens = "
            f"{limit}: it would be trained on responses longer than it may generate; raise rollout.max_tokens or shorten the "
            "demonstrations"
        )
