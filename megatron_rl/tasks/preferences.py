"""Preference pairs: two responses to a prompt, of which one was preferred.

A row has `chosen` and `rejected`, each the response's text or a list of chat messages: those behind the prompt, or the whole
conversation. `margin`, a number, may say how much better the chosen one is. Columns of other names are mapped by
`columns.metadata`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.base.messages import errors_named
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.data.sample import Message, Prompt, Sample
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards.reward_model import conversation, conversation_ids
from megatron_rl.tasks.loading import Prompts
from megatron_rl.tasks.rows import prune

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Pair:
    """Tokens of both whole conversations, and how much better the chosen one is; 0 where nothing is known."""

    task: str
    chosen: list[int]
    rejected: list[int]
    margin: float

    @property
    def num_tokens(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class PreferencePairs:
    """All pairs of a run. `eval`: by task."""

    train: list[Pair]
    eval: dict[str, list[Pair]]


def conversations(prompt: Prompt, fields: Mapping[str, object]) -> tuple[Prompt, Prompt]:
    """The preferred conversation, and the other one. `fields`: the sample's metadata.

    Raises:
        ValueError: a side is missing, empty or no conversation, or both are the same.
    """
    chosen, rejected = (_conversation(prompt, side, fields.get(side)) for side in SIDES)
    if chosen == rejected:
        raise ValueError("'chosen' and 'rejected' are the same: nothing can be learned from such a pair; remove it")
    return chosen, rejected


def _conversation(prompt: Prompt, side: str, response: object) -> Prompt:
    if isinstance(response, str) and response:
        return conversation(prompt, response)
    if isinstance(response, list) and response and all(isinstance(turn, dict) and "role" in turn for turn in response):
        before = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        turns = [Message(prune(turn)) for turn in response]
        return turns if turns[: len(before)] == prune(before) else [*before, *turns]
    said = "is missing" if response is None else f"must be text or a list of chat messages, not {response!r:.80}"
    raise ValueError(f"the pair's {side!r} {said}; columns.metadata.{side} names another column")


def margin_of(fields: Mapping[str, object]) -> float:
    """ValueError: it is no finite number."""
    value = fields.get("margin")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the pair's 'margin' must be a finite number, not {value!r:.80}")
    return float(value)


def load_pairs(
    prompts: Prompts, tokenizer: Tokenizer, rollout: RolloutConfig, vocab_size: int, note: Callable[[str], None]
) -> PreferencePairs:
    """The pairs of all prompts, in tokens.

    Args:
        vocab_size: of the model.
        note: called with a sentence for every task of which pairs are left out.

    Raises:
        ValueError: as `pairs_of`.
    """
    max_tokens = rollout.max_prompt_tokens + rollout.max_tokens

    def fitting(samples: Sequence[Sample], what: str) -> list[Pair]:
        pairs, dropped = pairs_of(samples, tokenizer, max_tokens, rollout.too_long, vocab_size)
        if dropped:
            note(f"left out {dropped} {what} of more than {max_tokens} tokens on a side")
        return pairs

    held_out = {task: fitting(samples, f"pairs of {task}") for task, samples in prompts.eval.items()}
    return PreferencePairs(fitting(prompts.train, "training pairs"), held_out)


def pairs_of(
    samples: Sequence[Sample], tokenizer: Tokenizer, max_tokens: int, too_long: str, vocab_size: int
) -> tuple[list[Pair], int]:
    """The samples' pairs in tokens, and how many were dropped as too long. `too_long`: `error` or `drop`.

    Raises:
        ValueError: a sample that is no pair, whose sides have the same tokens, or tokens that the model has no row for, or
            that is too long under `error`; none is left.
    """
    pairs = []
    for sample in samples:
        with errors_named(sample.id):
            both = conversations(sample.prompt, sample.metadata)
            chosen, rejected = (conversation_ids(tokenizer, whole) for whole in both)
            if chosen == rejected:
                raise ValueError(
                    "'chosen' and 'rejected' are the same tokens: the tokenizer does not know what differs"
                )
            highest = max(*chosen, *rejected)
            if highest >= vocab_size:
                raise ValueError(
                    f"token {tokenizer.convert_ids_to_tokens(highest)!r} has number {highest}, and the model only those "
                    f"below vocab_size = {vocab_size}: the tokenizer in its folder is another model's"
                )
            longest = max(len(chosen), len(rejected))
            if longest <= max_tokens:
                pairs.append(Pair(sample.task, chosen, rejected, margin_of(sample.metadata)))
            elif too_long == "error":
                raise ValueError(
                    f"a conversation has {longest} tokens, more than rollout.max_prompt_tokens + rollout.max_tokens = "
                    f"{max_tokens}; raise them, or set rollout.too_long=drop to leave such pairs out"
                )
    if not pairs:
        raise ValueError(f"no pair has at most {max_tokens} tokens on each side; raise rollout.max_tokens")
    return pairs, len(samples) - len(pairs)
