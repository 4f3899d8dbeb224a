"""A step's groups with dynamic sampling: others take the place of those without signal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_rl.algorithms.shaping import groups_with_variance
from megatron_rl.data.resample import groups_to_draw
from megatron_rl.data.rollout import Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.trainer.state import State

if TYPE_CHECKING:
    from megatron_rl.trainer.sampler import Sampler


def sample_with_signal(sampler: Sampler, step: int, state: State) -> tuple[Rollouts, State, dict[str, float]]:
    """Draws until a step has its groups with a signal, the first in the order of the prompts, or until
    `algorithm.resample_rounds` further rounds are used up. Returns them; the state with the prompts of whole rounds taken;
    and metrics.

    A group has the same seeds whenever it is drawn, so `algorithm.resample_ahead`, which draws others at once, leaves this
    result as it is.
    """
    algorithm, needed = sampler.config.algorithm, sampler.config.trainer.prompts_per_step
    end = needed * (algorithm.resample_rounds + 1)  # places, from the state's position on
    accepted: Rollouts | None = None
    without: Rollouts | None = None  # what was drawn, while no group has a signal
    place_of = dict[str, int]()  # of each accepted group's prompt
    begin, num_accepted, drew = 0, 0, (state.groups_drawn or needed, needed)
    while num_accepted < needed and begin < end:
        count = min(end - begin, groups_to_draw(needed - num_accepted, *drew) if algorithm.resample_ahead else needed)
        prompts = sampler.training_prompts(state.position + begin, count)
        first_place = {sample.id: begin + i for i, sample in reversed([*enumerate(prompts)])}
        samples = distinct(prompts, accepted.samples if accepted else [])
        begin += count
        if samples:
            drawn = sampler.scored_groups(samples, step)
            signal = groups_with_variance(sampler.reward_table(drawn), algorithm.zero_variance_rewards).tolist()
            more = drawn.of_prompts([i for i, has_signal in enumerate(signal) if has_signal][: needed - num_accepted])
            accepted = accepted + more if accepted else more
            place_of |= {sample.id: first_place[sample.id] for sample in more.samples}
            num_accepted = len(accepted.samples)
            without = None if num_accepted else drawn if without is None else without + drawn
        drew = (begin, num_accepted)
    assert accepted is not None  # there is a round
    if without is not None:  # nothing to learn from in any round: the step reports the last one, and leaves the weights
        row_of = {sample.id: row for row, sample in enumerate(without.samples)}
        round_ = distinct(sampler.training_prompts(state.position + end - needed, needed), [])
        accepted = without.of_prompts([row_of[sample.id] for sample in round_])
    last = max(place_of.values()) if num_accepted == needed else end - 1
    rounds = last // needed + 1
    state = replace(state, position=state.position + rounds * needed, groups_drawn=last + 1)
    return accepted, state, {"rollouts/rounds": float(rounds)}


def distinct(samples: Sequence[Sample], taken: Sequence[Sample]) -> list[Sample]:
    """A prompt comes once per step, also where the step is longer than the epoch: groups are formed by prompt id."""
    seen = {sample.id for sample in taken}
    return [sample for sample in samples if not (sample.id in seen or seen.add(sample.id))]  # type: ignore[func-returns-value]
