"""The prompts of a run, no longer than the recipe allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_rl.config.schema import Config
from megatron_rl.data import Sample
from megatron_rl.images import ImageReader
from megatron_rl.tasks import Prompts, filter_by_length, load_tasks, tasks_to_evaluate
from megatron_rl.tokenizer import Tokenizer


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
    """Looks for demonstrations that are too long, before the model is loaded. Only texts that may be are tokenised.

    Raises:
        ValueError: one has more than `limit` tokens, with the end-of-sequence token behind it.
    """
    texts = {sample.id: sample.demonstration for sample in samples if sample.demonstration is not None}
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
