"""Partial rollouts by engines of arithmetic: nothing is lost, nothing trained on twice, and each token says who drew it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config import to_yaml
from megatron_rl.config.rollout_keys import PartialConfig
from megatron_rl.config.schema import Config
from megatron_rl.data.pause import can_wait, trained_groups
from megatron_rl.data.rollout import Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.dispatch import Dispatcher
from megatron_rl.rollout.engine import Completion, Request
from megatron_rl.rollout.generate import generate
from megatron_rl.rollout.partial import next_positions, pack, unpack
from megatron_rl.rollout.sampling import rollout_seed
from megatron_rl.runtime.distributed import EngineGroup
from megatron_rl.tasks import PromptOrder
from megatron_rl.trainer.compatibility import check_waiting
from megatron_rl.trainer.partial_sampling import check_prompts, sample_partial
from megatron_rl.trainer.state import State

UPDATES = 2  # of a step
GROUP = 2


class Arithmetic:
    """Draws a token per request and pass. A token's number is the version of the weights and its place in the response, its
    log-prob minus the number; a seed decides nothing but is noted."""

    room, experts = 3, None

    def __init__(self, lengths: dict[tuple[str, int], int], prompt: int = 2) -> None:
        self.lengths, self.prompt, self.version = lengths, prompt, 0
        self.open: list[tuple[Request, list[int]]] = []
        self.seeds: dict[tuple[str, int, int], int | None] = {}  # by name and place of the first token

    @property
    def pending(self) -> int:
        return len(self.open)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.seeds[*request.name, len(request.tokens) - self.prompt] = request.seed
            self.open.append((request, []))

    def step(self) -> list[Completion]:
        ended = []
        for request, ids in self.open[: self.room]:
            place = len(request.tokens) - self.prompt + len(ids)
            ids.append(1000 * self.version + place)
            done = place + 1 == self.lengths[request.name]
            if done or len(ids) == request.sampling.max_tokens:
                values = [-float(token) for token in ids]
                reason = "stop" if done else "length"
                ended.append(Completion(request, ids, values, reason, self.version, np.zeros(0, dtype=np.float32)))
        self.open = [(request, ids) for request, ids in self.open if all(request is not end.request for end in ended)]
        return ended


class World:
    """Engines of one rank each, in threads."""

    def __init__(self, engines: int) -> None:
        self.barrier, self.box, self.counts = threading.Barrier(engines), dict[int, Any](), Counter[str]()
        self.lock, self.engines = threading.Lock(), engines
        self.grids: list[Any] = [self.grid(rank) for rank in range(engines)]

    def grid(self, rank: int) -> Any:
        def all_gather(item: Any) -> list[Any]:
            self.box[rank] = item
            self.barrier.wait(20)
            items = [self.box[r] for r in range(self.engines)]
            self.barrier.wait(20)
            return items

        def add(name: str, amount: int) -> int:
            with self.lock:
                self.counts[name] += amount
                return self.counts[name]

        group = EngineGroup(index=rank, count=self.engines)
        more = {"all_gather": all_gather, "all_gather_bytes": all_gather, "gather": all_gather}
        return SimpleNamespace(
            rank=rank,
            world=self.engines,
            is_main=rank == 0,
            engine=group,
            store=SimpleNamespace(add=add),
            **more,
        )

    def each(self, function: Any, arguments: Sequence[Any]) -> list[Any]:
        with ThreadPoolExecutor(self.engines) as threads:
            return list(threads.map(function, arguments))


def sampler_of(grid: Any, config: Config, samples: list[Sample], engine: Arithmetic) -> Any:
    """What `sample_partial` uses of a `Sampler`, with `generate` and its dispatcher as they are."""
    order, by = PromptOrder(len(samples), 0), Dispatcher(grid, engine.room)

    def draw(*arguments: Any, **more: Any) -> Rollouts:
        return generate(engine, by, *arguments, **more)  # type: ignore[arg-type]

    return SimpleNamespace(
        config=config,
        grid=grid,
        engine=engine,
        draw=draw,
        tokenizer=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        training_prompt=lambda position: samples[order.take(position, 1)[0]],
    )


def recipe(prompts: int, opened: int, chunk: int, max_tokens: int, max_staleness: int = 3) -> Config:
    config = Config(run_dir="")
    config.rollout.partial = PartialConfig(chunk_tokens=chunk, open_prompts=opened, max_staleness=max_staleness)
    config.rollout.group_size, config.rollout.max_tokens = GROUP, max_tokens
    config.trainer.prompts_per_step, config.trainer.minibatches = prompts, UPDATES
    return config


def trained_in(
    config: Config, lengths: dict[tuple[str, int], int], prompts: int, steps: int, engines: Sequence[int]
) -> tuple[list[dict[tuple[str, int], list[int]]], State, list[dict[str, float]], dict[Any, int | None]]:
    """Tokens of the rollouts that each step trains on, by name; the last state, metrics and seeds. `engines`: of each step;
    where their number changes, what waits goes through the file of a checkpoint."""
    samples = [Sample(f"t/{i}", "t", "", [1, 2]) for i in range(prompts)]
    states: list[State] = []
    seeds: dict[Any, int | None] = {}
    world, batches, metrics = World(0), [], []
    for number in range(1, steps + 1):
        if engines[number - 1] != world.engines:
            content = None
            if states:
                content = world.each(
                    lambda it: pack(*it), [(g, s.waiting) for g, s in zip(world.grids, states, strict=True)]
                )[0]
            last, world = states[0] if states else State(), World(engines[number - 1])
            samplers = [sampler_of(grid, config, samples, Arithmetic(lengths)) for grid in world.grids]
            waits = [None if content is None else unpack(content, s.grid, s.training_prompt) for s in samplers]
            states = [State(position=last.position, waiting=waiting) for waiting in waits]
        for each in samplers:
            each.engine.version = (number - 1) * UPDATES
        done = world.each(lambda it: sample_partial(it[0], number, it[1]), [*zip(samplers, states, strict=True)])  # noqa: B023
        states = [state for _, state, _ in done]
        rollouts = done[0][0]
        tokens = dict[int, list[int]]()
        for rank, (drawn, _, _) in enumerate(done):
            for row, rollout in drawn.held.items():
                check_authors(rollout, number)
                if drawn.facts["source"][row] == rank:
                    tokens[row] = rollout.response_ids.tolist()
        assert sorted(tokens) == list(range(len(rollouts)))
        named = {(rollouts.sample(row).id, row % GROUP): ids for row, ids in tokens.items()}
        batches.append(named)
        metrics.append(done[0][2])
        for each in samplers:
            seeds |= {(number, *key): seed for key, seed in each.engine.seeds.items()}
            each.engine.seeds.clear()
    return batches, states[0], metrics, seeds


def check_authors(rollout: Any, step: int) -> None:
    """Every token has the version that drew it, its log-prob, and its place; none is missing."""
    for segment in rollout.segments[1:]:
        assert (segment.ids // 1000 == segment.version).all()
        assert (segment.logprobs == -segment.ids).all()
    assert (rollout.response_ids % 1000).tolist() == list(range(rollout.length))
    assert rollout.version == rollout.response_ids[0] // 1000 >= (step - 1 - 3) * UPDATES, "max_staleness"


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_prompt_is_lost_or_comes_twice_and_each_token_says_who_drew_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    opened = data.draw(st.integers(count, 4 * count))
    prompts, steps = data.draw(st.integers(opened, 3 * opened)), 6
    limit = data.draw(st.integers(1, 20))
    config = recipe(count, opened, data.draw(st.integers(1, 8)), limit)
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    lengths = {(f"t/{i}", j): int(random.lognormal(1.5, 1)) + 1 for i in range(prompts) for j in range(GROUP)}
    batches, state, metrics, _ = trained_in(config, lengths, prompts, steps, [1] * steps)
    assert all(len(batch) == count * GROUP for batch in batches)
    for batch in batches:
        for name, ids in batch.items():
            assert len(ids) == min(lengths[name], limit), "whole"
    order, waiting = PromptOrder(prompts, 0), state.waiting
    assert waiting is not None
    taken = Counter(f"t/{i}" for i in order.take(0, state.position))
    later = Counter(f"t/{order.take(place, 1)[0]}" for place in (*waiting.positions, *waiting.postponed))
    done = Counter(sample_id for batch in batches for sample_id, index in batch if index == 0)
    assert done + later == taken, "the synchronous run's prompts, but those that wait"
    assert len(waiting) == opened - count
    assert waiting.rollouts.facts["length"].sum() == metrics[-1]["rollouts/waiting_tokens"]
    drawn = sum(row["rollouts/drawn_tokens"] for row in metrics)
    assert (
        drawn == sum(len(ids) for batch in batches for ids in batch.values()) + metrics[-1]["rollouts/waiting_tokens"]
    )
    engines = data.draw(st.lists(st.integers(1, 3), min_size=steps, max_size=steps))
    again = trained_in(config, lengths, prompts, steps, engines)
    assert again[0] == batches, "whatever the engines, and a checkpoint between any two steps"
    assert again[1].position == state.position
    assert again[2] == metrics


def test_what_is_postponed_is_not_lost_where_no_group_waits() -> None:
    lengths = {(f"t/{i}", j): 1 for i in range(4) for j in range(GROUP)}
    batches, state, _, _ = trained_in(recipe(3, 3, 1, 1), lengths, 4, 6, [1] * 6)
    assert state.waiting is not None
    assert len(state.waiting) == 0
    trained = Counter(sample_id for batch in batches for sample_id, index in batch if index == 0)
    order = PromptOrder(4, 0)
    postponed = Counter(f"t/{order.take(place, 1)[0]}" for place in state.waiting.postponed)
    assert trained + postponed == Counter(f"t/{i}" for i in order.take(0, state.position))


def test_a_chunk_has_a_seed_of_its_own_whichever_step_draws_it() -> None:
    lengths = {(f"t/{i}", j): 3 + 5 * (i % 3) for i in range(9) for j in range(GROUP)}
    _, _, _, seeds = trained_in(recipe(2, 4, 4, 12), lengths, 9, 4, [1] * 4)
    opened = {}
    for number, sample_id, index, place in sorted(seeds):
        if place == 0:
            opened[sample_id] = number
        assert seeds[number, sample_id, index, place] == rollout_seed(
            0, opened[sample_id], sample_id, index, turn=place
        )
    assert any(place and number > opened[name] for number, name, _, place in seeds), "some went on in a later step"
    assert len({*seeds.values()}) == len(seeds)


def test_metrics_of_partial_rollouts_a_second_time() -> None:
    """From the tokens, which say by what and where they were drawn; two groups, whose chunks have 4 tokens."""
    lengths = {(f"t/{i}", j): 3 + 5 * (i % 3) for i in range(9) for j in range(GROUP)}
    batches, state, metrics, seeds = trained_in(recipe(2, 4, 4, 12), lengths, 9, 4, [1] * 4)
    for number, (batch, row) in enumerate(zip(batches, metrics, strict=True), 1):
        ages = [number - 1 - token // 1000 // UPDATES for ids in batch.values() for token in ids]
        assert row["rollouts/staleness_mean"] == pytest.approx(np.mean(ages))
        assert row["rollouts/staleness_max"] == max(ages)
        assert [row[f"rollouts/staleness_{age}"] for age in range(4)] == pytest.approx(
            [ages.count(age) / len(ages) for age in range(4)]
        )
        cut = sum(len({token // 1000 for token in ids}) > 1 for ids in batch.values())
        assert row["rollouts/partial_ratio"] == cut / len(batch)
        begun = [place for step, _, _, place in seeds if step == number]
        assert row["rollouts/recomputed_tokens"] == sum(begun)
        first = {
            name: min(place for step, *other, place in seeds if (step, *other) == (number, *name))
            for name in {(sample_id, index) for step, sample_id, index, _ in seeds if step == number}
        }
        drawn = Counter((sample_id, index) for step, sample_id, index, _ in seeds if step == number)
        assert row["rollouts/chunks"] == max(drawn.values())
        assert row["rollouts/drawn_tokens"] == sum(
            min(lengths[name] - place, 4 * drawn[name]) for name, place in first.items()
        )
        assert row["rollouts/waiting_groups"] == 2
    assert max(row["rollouts/staleness_max"] for row in metrics) >= 1
    assert state.waiting is not None
    assert metrics[-1]["rollouts/waiting_tokens"] == sum(r.length for r in state.waiting.rollouts.held.values())


def test_the_oldest_finished_groups_are_trained_on_and_the_pause_waits_for_those_that_are_due() -> None:
    assert trained_groups([True, False, True, True], [1, 1, 2, 2], 2, 2, 3) == [0, 2]
    assert trained_groups([True, False, False, False], [1, 1, 2, 2], 2, 2, 3) == [], "too few"
    assert trained_groups([False, True, True, True], [1, 1, 2, 2], 2, 2, 1) == [], (
        "the first would be too old in step 3"
    )
    assert trained_groups([True, True, False, False], [1, 1, 2, 2], 2, 2, 1) == [0, 1]
    # three that are due in step 3, which trains on two: one of them has to come now
    assert trained_groups([False, False, False, True, True], [1, 1, 1, 2, 2], 2, 2, 2) == []
    assert trained_groups([True, False, False, True, True], [1, 1, 1, 2, 2], 2, 2, 2) == [0, 3]


@given(st.data())
def test_what_can_wait_is_trained_on_in_time_and_no_step_waits_for_ever(data: st.DataObject) -> None:
    """Also where the recipe has changed since the groups were opened."""
    count, staleness, step = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), 9
    opened = sorted(data.draw(st.lists(st.integers(step - 6, step), max_size=20)))
    most = data.draw(st.integers(count, (staleness + 1) * count))
    if not can_wait(opened, step, count, staleness):
        return
    for number in range(step + 1, step + 12):
        opened += [number] * (most - len(opened))
        chosen = trained_groups([True] * len(opened), opened, number, count, staleness)
        assert len(chosen) == count
        assert all(number - opened[place] <= staleness for place in chosen)
        opened = [each for place, each in enumerate(opened) if place not in chosen]


@pytest.mark.parametrize(
    ("prompts", "staleness", "group", "updates", "said"),
    [
        (2, 3, GROUP, UPDATES, None),
        (3, 2, GROUP, 3, None),
        (1, 4, GROUP, UPDATES, None),
        (1, 3, GROUP, UPDATES, "4 prompts wait in it, which this recipe does not train on within .* = 3 weight syncs"),
        (2, 3, 4, UPDATES, "prompts wait in it with 2 responses each, and rollout.group_size is 4"),
        (2, 3, GROUP, 1, "a step of this recipe has fewer of these; leave trainer.minibatches"),
    ],
)
def test_a_recipe_that_cannot_train_on_what_waits_is_refused(
    tmp_path: Path, prompts: int, staleness: int, group: int, updates: int, said: str | None
) -> None:
    config = recipe(2, 6, 2, 12)
    lengths = {(f"t/{i}", j): 5 for i in range(9) for j in range(GROUP)}
    _, state, _, _ = trained_in(config, lengths, 9, 1, [1])
    assert state.waiting is not None
    (tmp_path / "waiting.npz").write_bytes(pack(World(1).grids[0], state.waiting) or b"")
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    state = replace(state, step=1)
    config.trainer.prompts_per_step, config.trainer.minibatches, config.rollout.group_size = prompts, updates, group
    config.rollout.partial = PartialConfig(chunk_tokens=2, open_prompts=6, max_staleness=staleness)
    with pytest.raises(CheckpointError, match=said) if said else contextlib.nullcontext():
        check_waiting(config, state, tmp_path)


def test_a_prompt_that_is_still_open_is_postponed() -> None:
    ids = "abcabc"
    taken, later, position = next_positions(lambda place: ids[place], 2, [0], {"a", "b"}, 1)
    assert (taken, later, position) == ([2], [0], 3), "c; a is open still"
    taken, later, position = next_positions(lambda place: ids[place], position, later, {"b"}, 2)
    assert (taken, later, position) == ([0, 5], [3, 4], 6)


def test_a_checkpoint_of_other_prompts_and_tasks_that_are_too_small_are_refused() -> None:
    lengths = {(f"t/{i}", j): 5 for i in range(9) for j in range(GROUP)}
    _, state, _, _ = trained_in(recipe(2, 4, 2, 12), lengths, 9, 1, [1])
    grid = World(1).grids[0]
    assert state.waiting is not None
    content = pack(grid, state.waiting)
    assert content is not None
    assert state.waiting is not None
    names = dict(zip(state.waiting.positions, [sample.id for sample in state.waiting.rollouts.samples], strict=True))
    unpack(content, grid, lambda position: Sample(names[position], "t", "", [1, 2]))
    for wrong in (
        lambda position: Sample("u/0", "u", "", [1, 2]),
        lambda position: Sample(names[position], "t", "", [1, 2, 3]),  # the same names of other prompts
        lambda position: Sample(names[position], "t", "", [1, 3]),
    ):
        with pytest.raises(
            ValueError, match=r"responses to the prompt t/\d wait in it, and the training prompts are no"
        ):
            unpack(content, grid, wrong)
    prompts: Any = SimpleNamespace(
        train=[Sample("a/0", "a", "", [1]), *(Sample(f"b/{i}", "b", "", [1]) for i in range(99))],
        weights={"a": 1.0, "b": 9.0},
    )
    check_prompts(recipe(2, 10, 2, 12), prompts)
    with pytest.raises(ValueError, match=r"keeps 11 prompts open, and those of tasks\.train\.a come again after 10"):
        check_prompts(recipe(2, 11, 2, 12), prompts)
