from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.actor.packing import (
    MicroBatch,
    balance,
    even_attention,
    fewest_bins,
    first_fit,
    held,
    pack,
    plan,
)
from megatron_rl.data.batch import TokenBatch
from megatron_rl.data.rollout import Rollout, Segment

CPU = torch.device("cpu")
BUDGET = 40
LENGTHS = st.lists(st.tuples(st.integers(1, 15), st.integers(1, 25)), min_size=1, max_size=30)


def sequences(lengths: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts and responses in which every token of the batch has a value of its own."""
    counter = iter(range(1, 10**6))
    prompts, responses = [], []
    for prompt, response in lengths:
        prompts.append(np.array([next(counter) for _ in range(prompt)]))
        responses.append(np.array([next(counter) for _ in range(response)]))
    return prompts, responses


def batch_of(prompts: list[np.ndarray], responses: list[np.ndarray]) -> TokenBatch:
    return TokenBatch.continuations(zip(prompts, responses, strict=True))


def check_pack(micro: MicroBatch, prompts: list[np.ndarray], responses: list[np.ndarray]) -> None:
    """Everything about one packed micro-batch that the model and the loss rely on."""
    offsets = micro.offsets.tolist()
    assert offsets[0] == 0
    assert offsets[-1] == len(micro.tokens) == len(micro.positions)
    assert micro.longest == max(np.diff(offsets))
    for local, row in enumerate(micro.rows):
        part = slice(offsets[local], offsets[local + 1])
        assert micro.tokens[part].tolist() == [*prompts[row], *responses[row]]
        assert micro.positions[part].tolist() == list(range(part.stop - part.start))
        mine = micro.sequence_ids == local
        assert micro.targets[mine].tolist() == responses[row].tolist()
        # Each response token is predicted from the token before it, of the same sequence.
        assert micro.predictors[mine].tolist() == list(range(part.start + len(prompts[row]) - 1, part.stop - 1))
    assert len(micro.targets) == len(micro.predictors) == len(micro.sequence_ids)


@settings(deadline=None, max_examples=100)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_plan_covers_every_response_token_once_within_the_budget(lengths, dp, multiple, padding, random) -> None:
    prompts, responses = sequences(lengths)
    totals = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))  # a minibatch of the batch
    shares = plan(totals, rows, dp, BUDGET, multiple)
    assert len(shares) == dp
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) % multiple == 0
    seen: list[int] = []
    for share in shares:
        for part in share:
            micro = pack(part, batch_of(prompts, responses), CPU, padding)
            assert sum(totals[row] for row in part) <= BUDGET
            assert len(micro.tokens) % padding == 0
            assert len(micro.tokens) > 0
            check_pack(micro, prompts, responses)
            seen += micro.targets.tolist()
    assert sorted(seen) == sorted(int(token) for row in rows for token in responses[row])


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), max_size=50), st.integers(1, 6))
def test_balance_keeps_the_spread_below_the_largest_cost(costs: list[int], parts: int) -> None:
    lists = balance(costs, parts)
    assert sorted(i for indices in lists for i in indices) == list(range(len(costs)))
    totals = [sum(costs[i] for i in indices) for indices in lists]
    assert max(totals) - min(totals) <= max(costs, default=0)


@settings(deadline=None)
@given(st.lists(st.integers(1, BUDGET), max_size=50))
def test_first_fit_never_leaves_two_bins_that_could_be_one(lengths: list[int]) -> None:
    bins = first_fit(lengths, BUDGET)
    assert sorted(i for indices in bins for i in indices) == list(range(len(lengths)))
    totals = sorted(sum(lengths[i] for i in indices) for indices in bins)
    assert all(total <= BUDGET for total in totals)
    assert len(totals) < 2 or totals[0] + totals[1] > BUDGET


def test_a_bin_that_first_fit_needs_beyond_the_fewest_is_avoided() -> None:
    lengths = [10, 8, 8, 3, 7, 3]
    assert len(first_fit(lengths, 20)) == 3
    assert sorted(sum(lengths[i] for i in indices) for indices in fewest_bins(lengths, 20)) == [19, 20]
    assert len(fewest_bins([15, 15, 2], 20)) == 2
    assert len(fewest_bins([15, 15, 15], 20)) == 3  # the sum fits 3 bins, nothing fits fewer


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(2, 6))
def test_attention_is_evened_out_at_no_more_than_two_percent_of_the_tokens(lengths: list[int], parts: int) -> None:
    before = balance(lengths, parts)
    after = even_attention(before, lengths)
    assert sorted(i for indices in after for i in indices) == list(range(len(lengths)))
    (old, old_squares), (new, new_squares) = (
        ([sum(lengths[i] ** power for i in indices) for indices in shares] for power in (1, 2))
        for shares in (before, after)
    )
    assert max(new) <= max(max(old), 1.02 * sum(lengths) / parts + 1e-9)
    assert sum(cost**2 for cost in new_squares) <= sum(cost**2 for cost in old_squares)


def test_long_sequences_are_exchanged_until_squares_are_even() -> None:
    """60 + 50 and 50 + 40 with 50 short ones each: tokens are even to 10 %, squares are 6,150 and 4,150."""
    lengths = [60, 50, 50, 40, *[1] * 100]
    squares = [
        sum(lengths[i] ** 2 for i in share)
        for share in even_attention([[0, 1, *range(4, 54)], [2, 3, *range(54, 104)]], lengths)
    ]
    assert max(squares) - min(squares) < 0.1 * sum(squares)


def test_a_sequence_longer_than_the_budget_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"41 tokens does not fit `actor.tokens_per_microbatch` \(40\); raise it"):
        first_fit([3, 41], BUDGET)


def test_bins_that_fit_are_not_replaced_by_even_ones_that_do_not() -> None:
    """Even bins are 7 and 5 tokens; first-fit's are 6 and 6."""
    lengths = [3, 3, 2, 2, 2]
    (bins,) = plan(lengths, range(5), 1, 6)
    assert [sum(lengths[row] for row in rows) for rows in bins] == [6, 6]


def test_a_micro_batch_without_sequences_still_has_tokens_for_the_model() -> None:
    micro = pack([], TokenBatch([], {}, {}), CPU, 4)
    assert len(micro.tokens) == 4
    assert micro.offsets.tolist() == [0, 4]
    assert micro.targets.shape == micro.predictors.shape == micro.sequence_ids.shape == (0,)


def test_numbers_per_token_land_on_their_tokens() -> None:
    prompts, responses = sequences([(2, 3), (1, 1), (4, 2)])
    micro = pack([2, 0], batch_of(prompts, responses), CPU)
    own = [np.array([0.1, 0.2, 0.3]), np.array([9.0]), np.array([0.4, 0.5])]
    np.testing.assert_allclose(micro.concatenate(own).numpy(), [0.4, 0.5, 0.1, 0.2, 0.3], rtol=1e-6)


@settings(deadline=None, max_examples=50)
@given(LENGTHS, st.integers(2, 4), st.integers(1, 4))
def test_context_parallel_ranks_share_every_sequence_and_all_its_response_tokens(lengths, cp, padding) -> None:
    prompts, responses = sequences(lengths)
    rows = list(range(len(lengths)))
    batch = batch_of(prompts, responses)
    whole = pack(rows, batch, CPU, padding)
    ranks = [pack(rows, batch, CPU, padding, cp, rank) for rank in range(cp)]
    for micro in ranks:
        assert len(micro.tokens) == int(micro.offsets[-1]) // cp
        assert len(micro.tokens) % padding == 0
        assert torch.equal(micro.targets, whole.targets)
        assert torch.equal(micro.sequence_ids, whole.sequence_ids)
        assert torch.equal(micro.offsets, ranks[0].offsets)
        assert bool((micro.offsets.diff() % (2 * cp) == 0).all())
        # What predicts a response token here is what predicts it in the whole: the same token at the same place.
        there = whole.predictors[micro.own]
        assert torch.equal(micro.tokens[micro.predictors], whole.tokens[there])
        assert torch.equal(micro.positions[micro.predictors], whole.positions[there])
    assert sorted(torch.cat([micro.own for micro in ranks]).tolist()) == list(range(len(whole.targets)))


def test_of_several_turns_only_the_sampled_tokens_are_scored() -> None:
    """Prompt, turn, tool result, turn: each sampled token is predicted from the preceding one, sampled or not."""
    drawn = [np.array([0.1, 0.2], dtype=np.float32), np.array([0.3], dtype=np.float32)]
    segments = [
        Segment(np.array([11, 12])),
        Segment(np.array([21, 22]), drawn[0], version=3),
        Segment(np.array([31, 32, 33])),
        Segment(np.array([41]), drawn[1], version=4),
    ]
    rollout = Rollout("t/0", 0, segments, "stop")
    assert rollout.tokens.tolist() == [11, 12, 21, 22, 31, 32, 33, 41]
    assert rollout.response_ids.tolist() == [21, 22, 41]
    np.testing.assert_array_equal(rollout.logprobs, np.concatenate(drawn))
    batch = TokenBatch.of([4, 8], {0: Rollout("t/1", 0, segments[:2], "stop"), 1: rollout})
    micro = pack([0, 1], batch, CPU)
    assert micro.targets.tolist() == [21, 22, 21, 22, 41]
    assert micro.tokens[micro.predictors].tolist() == [12, 21, 12, 21, 33]
    assert micro.sequence_ids.tolist() == [0, 0, 1, 1, 1]
    assert micro.concatenate({0: drawn[0], 1: rollout.logprobs}).tolist() == pytest.approx([0.1, 0.2, 0.1, 0.2, 0.3])


def test_a_rollouts_sequences_are_packed_by_themselves_and_count_as_one() -> None:
    """The second begins with what the first has drawn, which is given there."""
    drawn = [np.array([0.1, 0.2], dtype=np.float32), np.array([0.3], dtype=np.float32)]
    segments = [
        Segment(np.array([11, 12])),
        Segment(np.array([21, 22]), drawn[0]),
        Segment(np.array([11, 12, 21, 22, 31]), begins_sequence=True),
        Segment(np.array([41]), drawn[1]),
    ]
    rollout, other = Rollout("t/0", 0, segments, "stop"), Rollout("t/1", 0, segments[:2], "stop")
    assert rollout.sequence_lengths == [4, 6]
    batch = TokenBatch.of([4, 10], {0: other, 1: rollout})
    micro = pack([1, 0], batch, CPU)
    assert micro.offsets.tolist() == [0, 4, 10, 14]
    assert micro.longest == 6
    assert micro.positions.tolist() == [*range(4), *range(6), *range(4)]
    assert micro.targets.tolist() == [21, 22, 41, 21, 22]
    assert micro.tokens[micro.predictors].tolist() == [12, 21, 31, 12, 21]
    assert micro.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    halves = [pack([1, 0], batch, CPU, cp=2, cp_rank=rank) for rank in (0, 1)]
    assert halves[0].offsets.tolist() == [0, 4, 12, 16]  # each is padded by itself
    assert sorted(torch.cat([half.own for half in halves]).tolist()) == list(range(5))
    for half in halves:
        wanted = micro.tokens[micro.predictors][half.own]
        assert torch.equal(half.tokens[half.predictors], wanted)


def test_experts_are_those_of_the_same_tokens_and_padding_has_some_too() -> None:
    batch = batch_of(*sequences([(2, 3), (1, 2)]))
    experts = np.arange(8 * 2, dtype=np.uint8).reshape(8, 2, 1)  # of 5 and 3 tokens, 2 layers, one each
    batch.experts = {0: experts[:5], 1: experts[5:]}
    assert pack([1, 0], batch, CPU).experts[:, 0, 0].tolist() == [10, 12, 14, 0, 2, 4, 6, 8]
    assert pack([0], batch, CPU, 4).experts[:, 1, 0].tolist() == [1, 3, 5, 7, 9, 1, 3, 5]
    assert pack([1], batch, CPU, 1, 2, 1).experts[:, 0, 0].tolist() == [12, 14]  # of 10, 12, 14 and a filler
    assert pack([], batch, CPU).experts is None
    batch.experts[1] = experts[5:7]
    with pytest.raises(ValueError, match="sequence 1 has 3 tokens, and experts of 2"):
        pack([0, 1], batch, CPU)


def test_a_context_parallel_rank_holds_pieces_from_both_ends() -> None:
    assert held([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert held([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    with pytest.raises(ValueError, match="6 tokens cannot be cut into 2 x 2"):
        held([6], 2, 0)


def test_what_is_packed_has_the_dtypes_that_the_model_and_the_loss_take() -> None:
    batch = batch_of(*sequences([(2, 3), (1, 1)]))
    micro, empty = pack([1, 0], batch, CPU), pack([], batch, CPU)
    for part in (micro, empty):
        assert part.offsets.dtype == torch.int32  # attention kernels' own
        for flat in (part.tokens, part.positions, part.targets, part.predictors, part.sequence_ids):
            assert flat.dtype == torch.int64
    numbers = [np.array([1, 2, 3]), np.array([4])]  # integers, as a reward may give
    assert micro.concatenate(numbers).tolist() == [4.0, 1.0, 2.0, 3.0]
    for flat in (micro.concatenate(numbers), empty.concatenate(numbers)):
        assert flat.dtype == torch.float32
    assert len(empty.concatenate(numbers)) == 0
