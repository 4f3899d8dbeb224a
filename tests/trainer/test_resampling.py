"""Dynamic sampling: what is drawn ahead changes nothing but how much is drawn at once."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import Config
from megatron_rl.data.resample import groups_to_draw
from megatron_rl.data.rewards import RewardTable
from megatron_rl.data.rollout import Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.tasks.order import PromptOrder
from megatron_rl.trainer.resampling import sample_with_signal
from megatron_rl.trainer.state import State

GROUP = 2


class Drawing:
    """A sampler whose groups have a signal or none, by prompt and step; `batches`: the prompts of each call."""

    def __init__(self, config: Config, prompts: int, share: float, seed: int) -> None:
        self.config, self._order = config, PromptOrder(prompts, seed)
        self._samples = [Sample(f"t/{i}", "t", "", [1]) for i in range(prompts)]
        self._share, self._seed, self._step = share, seed, 0
        self.batches: list[list[str]] = []
        self.without: tuple[int, ...] = ()  # steps in which no group has a signal

    def has_signal(self, name: str, step: int) -> bool:
        share = 0.0 if step in self.without else self._share
        return zlib.crc32(f"{self._seed} {step} {name}".encode()) < share * 2**32

    def training_prompts(self, position: int, count: int) -> list[Sample]:
        return [self._samples[i] for i in self._order.take(position, count)]

    def scored_groups(self, samples: list[Sample], step: int) -> Rollouts:
        self._step = step
        self.batches.append([sample.id for sample in samples])
        return Rollouts.unbegun(samples, GROUP)

    def reward_table(self, drawn: Rollouts) -> RewardTable:
        differs = torch.tensor([self.has_signal(sample.id, self._step) for sample in drawn.samples])
        values = torch.stack([torch.zeros(len(differs)), differs.double()], 1)[..., None].double()
        return RewardTable(values, ("r",), weights={"r": 1.0})


def by_rounds(sampler: Drawing, state: State, step: int) -> tuple[list[str], int]:
    """The definition: a round after the other, the first groups with a signal; the rounds."""
    needed, rounds = sampler.config.trainer.prompts_per_step, sampler.config.algorithm.resample_rounds + 1
    accepted: list[str] = []
    drawn: list[str] = []
    for round_ in range(rounds):
        prompts = sampler.training_prompts(state.position + round_ * needed, needed)
        drawn = [name for name in dict.fromkeys(sample.id for sample in prompts) if name not in accepted]
        accepted += [name for name in drawn if sampler.has_signal(name, step)][: needed - len(accepted)]
        if len(accepted) == needed:
            break
    return accepted or drawn, round_ + 1


def recipe(needed: int, rounds: int, ahead: bool) -> Config:
    config = Config(run_dir="")
    config.trainer.prompts_per_step, config.algorithm.resample_rounds = needed, rounds
    config.algorithm.resample_ahead = ahead
    return config


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.floats(0, 1), st.integers(1, 60), st.integers(0, 999))
def test_the_first_groups_with_a_signal_in_the_order_of_the_prompts(
    needed: int, rounds: int, share: float, prompts: int, seed: int
) -> None:
    """Also where none has one, and where the step is longer than an epoch."""
    for ahead in (False, True):
        sampler: Any = Drawing(recipe(needed, rounds, ahead), prompts, share, seed)
        sampler.without, state = (3,), State()
        for step in range(1, 5):
            wanted, taken = by_rounds(sampler, state, step)
            sampler.batches.clear()
            rollouts, after, metrics = sample_with_signal(sampler, step, state)
            assert [sample.id for sample in rollouts.samples] == wanted
            assert len(rollouts) == len(wanted) * GROUP
            assert after.position == state.position + taken * needed
            assert metrics == {"rollouts/rounds": taken}
            if not ahead:
                assert len(sampler.batches) <= taken
                assert all(len(batch) <= needed for batch in sampler.batches)
            state = after


def test_most_steps_draw_once_and_little_in_excess() -> None:
    """256 prompts a step, as `plan --simulate` has them: the first step does not know the share, later ones do."""
    for share in (0.3, 0.6, 0.9, 1.0):
        sampler: Any = Drawing(recipe(256, 10, True), 40_000, share, seed=1)
        state, calls, drawn = State(), list[int](), list[int]()
        for step in range(1, 16):
            sampler.batches.clear()
            _, state, _ = sample_with_signal(sampler, step, state)
            calls.append(len(sampler.batches))
            drawn.append(sum(map(len, sampler.batches)))
        assert calls[0] == (1 if share == 1 else 2)
        assert np.mean(calls[1:]) < 1.15
        least = 256 / share
        assert least <= np.mean(drawn[1:]) < least + 4 * np.sqrt(2 * 256 * (1 - share)) / share + 1


def test_a_draw_is_enough_49_times_in_50() -> None:
    random = np.random.default_rng(0)
    for share in (0.2, 0.5, 0.95):
        enough = 0
        for _ in range(2000):
            before = 256 + int(random.negative_binomial(256, share))  # until 256 had a signal
            enough += random.binomial(groups_to_draw(256, before, 256), share) >= 256
        assert 0.96 < enough / 2000 < 0.995
    assert groups_to_draw(8, 40, 0) == groups_to_draw(8, 8, 8) == 8


def test_the_groups_of_the_last_step_are_in_checkpoints() -> None:
    state = State(step=3, position=24, groups_drawn=13)
    saved: Any = {"progress": state.progress()}
    assert State.of(saved) == state
    assert "groups_drawn" not in State(step=3, position=24).progress()
