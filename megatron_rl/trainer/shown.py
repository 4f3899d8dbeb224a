"""Rollouts as they are written down: whole on rank 0, with text, rewards and what rewards remark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.data.rollout import UNANSWERED, Rollout, Rollouts, scored_sample
from megatron_rl.data.sample import Sample
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards import Scorer
from megatron_rl.rollout.ahead import add_conversations, conversations_of
from megatron_rl.rollout.exchange import exchange
from megatron_rl.runtime.distributed import ProcessGrid


def decode(tokenizer: Tokenizer, rollouts: Sequence[Rollout]) -> None:
    """Fills in `text`, where there are no messages yet."""
    rollouts = [rollout for rollout in rollouts if not rollout.messages]
    if not rollouts:
        return  # a tokenizer makes one text of no sequences
    texts = tokenizer.batch_decode(
        [rollout.response_ids for rollout in rollouts], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    for rollout, text in zip(rollouts, texts, strict=True):
        rollout.text = text


def fetch_to_rank0(grid: ProcessGrid, rollouts: Rollouts, count: int, tokenizer: Tokenizer) -> list[Rollout]:
    """The first `count` rollouts with tokens, text and rewards, on rank 0, without routed experts (unused there); []
    elsewhere."""
    rows = [row for row in range(len(rollouts))[:count] if rollouts.facts["source"][row] != UNANSWERED]
    received = exchange(grid, replace(rollouts, experts=None, token_weights={}), [((0,), rows)])
    if any(rollouts.sample(row).agent is not None for row in rows):
        for of_rank in grid.gather(conversations_of(rollouts, rows, grid.rank)):  # [] but on rank 0
            add_conversations(received, of_rank)
    fetched = [received[row] for row in rows if grid.is_main]
    decode(tokenizer, fetched)
    for row, rollout in zip(rows if grid.is_main else (), fetched, strict=True):
        rollout.rewards = rollouts.rewards_of(row)
    return fetched


def remarks_of(
    scorer: Scorer, tokenizer: Tokenizer, samples: Sequence[Sample], rollouts: Sequence[Rollout], with_pieces: bool
) -> list[dict[str, object]]:
    """Returns for each scored rollout `remarks`, what rewards say of it; and with `with_pieces` the text of each response
    token by itself, where part of a character is U+FFFD."""
    by_id, entries = {sample.id: sample for sample in samples}, list[dict[str, object]]()
    for rollout in rollouts:
        sample, tokens = scored_sample(by_id[rollout.sample_id], rollout), [[token] for token in rollout.response_ids]
        entry: dict[str, object] = {}
        if remarks := scorer.remarks(rollout.text, sample, rollout.finish_reason, rollout.length):
            entry["remarks"] = remarks
        if with_pieces:  # a tokenizer makes one text of no tokens
            entry["pieces"] = tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False) if tokens else []
        entries.append(entry)
    return entries
