"""A batch that was drawn ahead, in a checkpoint: with conversations, turns' rewards, experts and greedy rollouts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron_rl.data.rollout import FACTS, Rollout, Rollouts, Segment, Turns
from megatron_rl.data.sample import Sample
from megatron_rl.rewards import ScoringStats
from megatron_rl.rewards.remote import Counts
from megatron_rl.rollout.ahead import _OF_CONVERSATION, Batch, pack, unpack
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.runtime.http import Traffic
from megatron_rl.trainer.step_counts import StepCounts

EXPERTS = np.dtype((np.uint16, (3, 2)))
ASKED = Counts(5, 1, Counter(failed=2, expired=1), "no reply", Traffic(requests=4, retries=1, latencies=[0.5, 1.5]))
COUNTS = StepCounts(
    ScoringStats({"slow": 2}, {"judge": (ASKED, {})}, 7, 3),
    Counter(drafted=10, accepted=4, drawn=40, drawn_below=20),
)


def drawn(sample: Sample, index: int, rng: np.random.Generator) -> Rollout:
    def segment(sampled: bool, begins: bool = False) -> Segment:
        ids = rng.integers(0, 60, rng.integers(1, 9))
        log_probs = rng.normal(size=len(ids)).astype(np.float32) if sampled else None
        return Segment(ids, log_probs, 4 + index if sampled else 0, begins)

    segments = [Segment(np.asarray(sample.prompt_ids)), segment(True), segment(False), segment(True)]
    rollout = Rollout(sample.id, index, [*segments, segment(False, begins=True), segment(True)], "stop")
    rollout.experts = rng.integers(0, 300, (rollout.num_tokens, 3, 2)).astype(np.uint16)
    rollout.token_rewards = rng.normal(size=(rollout.length, 1)).astype(np.float32)
    if sample.agent is not None:
        rollout.messages = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "a", "tool_calls": []}]
        rollout.conversations, rollout.last_turn = [rollout.messages, rollout.messages[:1]], "a"
        rollout.agent_rewards, rollout.turn_rewards = {"r": float("nan")}, {"r": (0.5, 1.0, -1.0)}
        rollout.failed_by = "model" if index else None
    return rollout


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    samples = [Sample(f"t/{i}", "t", "?", [7, 8, 9][: i + 1], agent="t" if i else None) for i in range(3)]
    held = {2 * i + j: drawn(sample, j, rng) for i, sample in enumerate(samples) for j in range(2)}
    facts = np.zeros(6, dtype=FACTS)
    for row, rollout in held.items():
        facts[row] = (row, rollout.num_tokens, rollout.length, row == 3, rollout.version, False, 0)
    turns = {row: Turns(held[row].turn_lengths, None if row == 5 else {"r": (0.5, 1.0, -1.0)}) for row in range(2, 6)}
    rollouts = Rollouts(
        samples, 2, facts, held, EXPERTS, 123, ("a", "b", "t"), rng.normal(size=(6, 3)), {"t": 0.5}, turns
    )
    rollouts.rewards[4, 1] = np.nan
    greedy = Rollouts(samples, 1, facts[::2].copy(), {}, columns=("a", "b"), rewards=rng.normal(size=(3, 2)))
    return Batch(rollouts, greedy, {"rollouts/sampled": 6.0}, COUNTS.plain(), {"timing_s/generate": 1.5})


def test_a_batch_comes_back_as_it_was(batch: Batch) -> None:
    content, samples = pack(ALONE, batch), {sample.id: sample for sample in batch.rollouts.samples}
    assert content is not None
    again = unpack(content, ALONE, samples)
    assert (again.metrics, again.seconds) == (batch.metrics, batch.seconds)
    assert StepCounts.of(again.counts) == COUNTS
    for mine, theirs in ((again.rollouts, batch.rollouts), (again.greedy, batch.greedy)):
        assert mine is not None
        assert theirs is not None
        assert mine.samples == theirs.samples
        assert np.array_equal(mine.facts, theirs.facts)
        np.testing.assert_array_equal(mine.rewards, theirs.rewards)
        for name in ("count", "columns", "experts", "drawn", "token_weights", "turns"):
            assert getattr(mine, name) == getattr(theirs, name), name
    assert again.rollouts.held.keys() == batch.rollouts.held.keys()
    for row, rollout in batch.rollouts.held.items():
        read = again.rollouts.held[row]
        for name in _OF_CONVERSATION:
            assert repr(getattr(read, name)) == repr(getattr(rollout, name)), name  # there are NaNs
        assert len(read.segments) == len(rollout.segments)
        for one, other in zip(read.segments, rollout.segments, strict=True):
            assert np.array_equal(one.ids, other.ids)
            assert (one.logprobs is None) == (other.logprobs is None)
            assert one.logprobs is None or np.array_equal(one.logprobs, other.logprobs)  # type: ignore[arg-type]
            assert (one.version, one.begins_sequence) == (other.version, other.begins_sequence)
        assert np.array_equal(read.experts, rollout.experts)  # type: ignore[arg-type]
        assert np.array_equal(read.token_rewards, rollout.token_rewards)  # type: ignore[arg-type]


def test_a_prompt_that_is_gone_is_named(batch: Batch) -> None:
    content = pack(ALONE, batch)
    assert content is not None
    with pytest.raises(
        ValueError, match="responses to the prompt t/1 wait in it, and the training prompts are no longer"
    ):
        unpack(content, ALONE, {sample.id: sample for sample in batch.rollouts.samples if sample.id != "t/1"})


def test_what_a_step_and_its_evaluation_counted_is_one_sum() -> None:
    both = StepCounts.of(COUNTS.plain())
    both += StepCounts(ScoringStats(remote={"judge": (Counts(3), {})}), Counter(drafted=10, drawn=10, drawn_below=10))
    metrics = both.metrics()
    assert (metrics["judge/scored"], metrics["judge/no_score"], metrics["reward_timeouts/slow"]) == (8, 3, 2)
    assert metrics["rollouts/draft_acceptance"] == 0.2
    assert (metrics["rollouts/drafted_share"], metrics["rollouts/drafted_share_below"]) == (4 / 50, 4 / 30)
    assert StepCounts.of({}).metrics() == {}
