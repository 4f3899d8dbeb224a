"""Rollouts by an engine's queue: who draws what, and what happens when an engine's ranks part ways."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms import RewardTable, make_algorithm
from megatron_rl.config.schema import Config
from megatron_rl.data.rollout import Rollout, Rollouts, Segment
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.dispatch import Dispatcher
from megatron_rl.rollout.engine import Completion, EngineError, Failure, Request
from megatron_rl.rollout.episode import single_turn
from megatron_rl.rollout.generate import generate
from megatron_rl.rollout.sampling import Sampling, rollout_seed
from megatron_rl.runtime.distributed import EngineGroup
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.trainer.learner import Learner

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=4)
SAMPLES = [Sample(f"t/{i}", "t", "", [10 + i]) for i in range(3)]


class Queue:
    """The only engine; draws a token per request, and ends the newest request first."""

    version, room, experts = 5, 8, None

    def __init__(self) -> None:
        self.requests: list[Request] = []

    @property
    def pending(self) -> int:
        return len(self.requests)

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests

    def step(self) -> list[Completion | Failure]:
        request = self.requests.pop()
        drawn = [int(request.tokens[0]) * 10 + request.name[1]]
        return [Completion(request, drawn, [-0.5], "stop", self.version, np.zeros(0, dtype=np.float32))]


def dispatcher(
    gather: Callable[[bytes], list[bytes]] = lambda data: [data], rank: int = 0, size: int = 1
) -> Dispatcher:
    """A rank of the only engine. `gather`: of what its ranks report."""
    grid: Any = SimpleNamespace(engine=EngineGroup(size=size, rank=rank), all_gather_bytes=gather)
    return Dispatcher(grid, Queue.room)


def generated(engine: Any, samples: Sequence[Sample], count: int, step: int = 3, **more: Any) -> Rollouts:
    return generate(engine, more.pop("by", dispatcher()), samples, count, single_turn(SAMPLING, 7, step), **more)


def test_rollouts_come_by_sample_then_index_with_their_version() -> None:
    engine: Any = Queue()
    seen: list[tuple[str, int]] = []
    there = {("t/1", 0): Rollout.single_turn(SAMPLES[1], 0, [7, 8, 9], "length")}

    def note(rollout: Rollout) -> None:
        seen.append((rollout.sample_id, rollout.index))

    drawn = generated(engine, SAMPLES, 2, on_finished=note, already_drawn=there)
    wanted = [(s.id, i) for s in SAMPLES for i in range(2)]
    assert [(drawn.held[row].sample_id, drawn.held[row].index) for row in range(6)] == wanted
    assert seen == [name for name in wanted[::-1] if name not in there], "in the order in which they end"
    ids = [drawn.held[row].response_ids.tolist() for row in range(6)]
    assert ids == [[100], [101], [7, 8, 9], [111], [120], [121]]
    assert drawn.facts["length"].tolist() == [1, 1, 3, 1, 1, 1]
    assert drawn.facts["num_tokens"].tolist() == [2, 2, 4, 2, 2, 2]
    assert drawn.facts["version"].tolist() == [5, 5, 0, 5, 5, 5]
    assert drawn.truncated.tolist() == [[False, False], [True, False], [False, False]]


def test_the_ranks_of_an_engine_take_turns_in_handing_out_what_all_of_them_drew() -> None:
    parts, both = {}, threading.Barrier(2)

    def rank_of(rank: int) -> Rollouts:
        def gather(own: bytes) -> list[bytes]:
            parts[rank] = own
            both.wait(10)
            return [parts[0], parts[1]]

        return generated(Queue(), SAMPLES, 2, by=dispatcher(gather, rank, 2))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank_of, range(2))
    assert first.facts["source"].tolist() == [0, 1, 0, 1, 0, 1]
    assert (first.facts == second.facts).all()
    assert sorted(first.held) == sorted(second.held) == [0, 1, 2, 3, 4, 5]


def test_groups_that_are_kept_and_joined_keep_what_is_known_of_them() -> None:
    drawn = generated(Queue(), SAMPLES, 2)
    drawn.columns, drawn.rewards = ("r",), np.arange(6.0)[:, None]
    kept = drawn.of_prompts([2]) + drawn.of_prompts([0])
    assert [sample.id for sample in kept.samples] == ["t/2", "t/0"]
    assert [kept.held[row].response_ids.tolist() for row in range(4)] == [[120], [121], [100], [101]]
    assert kept.facts["row"].tolist() == [0, 1, 2, 3]
    assert [kept.rewards_of(row)["r"] for row in range(len(kept))] == [4, 5, 0, 1]
    assert [outcome.sample_id for outcome in kept.outcomes()] == ["t/2", "t/2", "t/0", "t/0"]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_seed_belongs_to_its_rollout_and_greedy_decoding_has_none(temperature: float) -> None:
    engine: Any = Queue()
    submitted: list[Request] = []
    engine.submit = lambda requests: (submitted.extend(requests), engine.requests.extend(requests))
    generate(engine, dispatcher(), SAMPLES, 2, single_turn(Sampling(temperature, 1.0, 4), 7, 3))
    seeds = {request.name: request.seed for request in submitted}
    assert seeds == {(s.id, i): rollout_seed(7, 3, s.id, i) if temperature else None for s in SAMPLES for i in range(2)}


def test_ranks_of_an_engine_that_draw_different_tokens_end_the_run() -> None:
    with pytest.raises(EngineError, match="ranks 0 and 1 of engine 0 have drawn different tokens"):
        generated(Queue(), SAMPLES, 1, by=dispatcher(lambda data: [data, b"another "], size=2))


class Failing(Queue):
    """Has no answer to the first rollout of any prompt."""

    def step(self) -> list[Completion | Failure]:
        if self.requests[-1].name[1] == 0:
            return [Failure(self.requests.pop(), "HTTP 500")]
        return super().step()


def test_a_request_without_an_answer_ends_the_run_or_leaves_its_rollout_out() -> None:
    with pytest.raises(EngineError, match="no answer to rollout 0 of t/2: HTTP 500"):
        generated(Failing(), SAMPLES, 1)
    failed: list[Failure] = []
    drawn = generated(Failing(), SAMPLES, 2, on_failed=failed.append)
    assert [failure.request.name for failure in failed] == [("t/2", 0), ("t/1", 0), ("t/0", 0)]
    assert sorted(drawn.held) == [1, 3, 5]
    drawn.columns, drawn.rewards = ("r",), np.zeros((6, 1))
    assert [(outcome.sample_id, outcome.length) for outcome in drawn.outcomes()] == [(s.id, 1) for s in SAMPLES]


class TwoTurns:
    """An episode whose first turn asks for a second, after tokens that nobody sampled."""

    def __init__(self, sample: Sample, index: int) -> None:
        self.sample, self.index = sample, index
        self.segments = [Segment(np.asarray(sample.prompt_ids))]

    def first(self) -> Request:
        tokens = [int(token) for segment in self.segments for token in segment.ids]
        return Request((self.sample.id, self.index), tokens, SAMPLING)

    def advance(self, completion: Completion) -> Request | Rollout:
        logprobs = np.asarray(completion.logprobs, dtype=np.float32)
        self.segments.append(Segment(np.asarray(completion.ids), logprobs, completion.version))
        if len(self.segments) > 2:
            return Rollout(self.sample.id, self.index, self.segments, completion.finish_reason)
        self.segments.append(Segment(np.array([1, 2])))
        return self.first()


def test_an_episode_may_ask_again_with_what_came_so_far() -> None:
    engine: Any = Queue()
    drawn = generate(engine, dispatcher(), SAMPLES[:2], 1, TwoTurns)
    assert [drawn.held[row].tokens.tolist() for row in (0, 1)] == [[10, 100, 1, 2, 100], [11, 110, 1, 2, 110]]
    assert drawn.held[0].loss_mask.tolist() == [False, True, False, False, True]
    assert (drawn.facts["num_tokens"].tolist(), drawn.facts["length"].tolist()) == ([5, 5], [2, 2])


def test_rollouts_of_other_weights_than_the_actors_are_refused() -> None:
    actor: Any = SimpleNamespace(optimizer_steps=6, grid=None)
    learner = Learner(Config(run_dir=""), actor, make_algorithm({"preset": "grpo"}), StepTimer())
    table = RewardTable(torch.tensor([[[0.0], [1.0]]]), ("r",))
    rollouts = generated(Queue(), SAMPLES[:1], 2)
    with pytest.raises(ValueError, match=r"optimizer steps \[5\], and the actor is at step 6: .* missed a weight sync"):
        learner.compute_advantages(table, rollouts)
    actor.optimizer_steps = 5
    assert learner.compute_advantages(table, rollouts).train.shape == (1, 2)
    learner.config.launch.generators = 1  # which draw a step ahead: one sync older, and no more
    actor.optimizer_steps = 6
    assert learner.compute_advantages(table, rollouts).train.shape == (1, 2)
    actor.optimizer_steps = 7
    with pytest.raises(ValueError, match="missed a weight sync"):
        learner.compute_advantages(table, rollouts)
