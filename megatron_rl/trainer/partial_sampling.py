"""A step's groups with partial rollouts: chunks are drawn until enough groups are finished, the rest waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.config.rollout_keys import PartialConfig
from megatron_rl.config.schema import Config
from megatron_rl.data.pause import trained_groups
from megatron_rl.data.rollout import Rollouts
from megatron_rl.rollout import partial
from megatron_rl.rollout.partial import Waiting, is_open
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.tasks import Prompts
from megatron_rl.trainer.shown import decode
from megatron_rl.trainer.state import State

if TYPE_CHECKING:
    from megatron_rl.trainer.sampler import Sampler


def sample_partial(sampler: Sampler, step: int, state: State) -> tuple[Rollouts, State, dict[str, float]]:
    """The groups that a step trains on, not scored yet; the state after it; and metrics."""
    config = sampler.config
    waiting, position = _opened(sampler, step, state)
    rollouts, drawn, read_again, chunks = waiting.rollouts, 0, 0, 0
    chosen: list[int] = []
    while not chosen:
        before = rollouts.facts["length"]
        going_on = is_open(rollouts.facts, config.rollout.max_tokens)
        read_again += int(before[going_on].sum())
        rollouts = _next_chunk(sampler, waiting.opened, rollouts)
        drawn += int((rollouts.facts["length"] - before).sum())
        chunks += 1
        still_open = is_open(rollouts.facts, config.rollout.max_tokens).reshape(-1, rollouts.count).tolist()
        limits = config.trainer.prompts_per_step, _partial(config).max_staleness
        chosen = trained_groups([not any(group) for group in still_open], waiting.opened, step, *limits)
    waiting = replace(waiting, rollouts=rollouts)
    trained, left = (
        replace(rollouts.of_prompts(chosen), drawn=drawn),
        waiting.of_groups(sorted({*range(len(waiting))} - {*chosen})),
    )
    decode(sampler.tokenizer, [*trained.held.values()])
    metrics = staleness_metrics(sampler.grid, trained, sampler.engine.version, config)
    metrics |= {
        "rollouts/sampled": float(len(trained)),
        "rollouts/chunks": float(chunks),
        "rollouts/drawn_tokens": float(drawn),
        "rollouts/recomputed_tokens": float(read_again),
        "rollouts/waiting_groups": float(len(left)),
        "rollouts/waiting_tokens": float(left.rollouts.facts["length"].sum()),
    }
    return trained, replace(state, position=position, waiting=left), metrics


def _partial(config: Config) -> PartialConfig:
    assert config.rollout.partial is not None
    return config.rollout.partial


def _opened(sampler: Sampler, step: int, state: State) -> tuple[Waiting, int]:
    """Returns what waits, with as many new groups as there is room for behind it; and the training prompts taken so far."""
    config = sampler.config
    waiting = state.waiting if isinstance(state.waiting, Waiting) else Waiting.none(config.rollout.group_size)
    is_there = {sample.id for sample in waiting.rollouts.samples}
    new, postponed, position = partial.next_positions(
        lambda at: sampler.training_prompt(at).id,
        state.position,
        waiting.postponed,
        is_there,
        _partial(config).opened(config.trainer.prompts_per_step) - len(waiting),
    )
    rollouts = waiting.rollouts
    unbegun = Rollouts.unbegun([sampler.training_prompt(at) for at in new], rollouts.count)
    return (
        Waiting(
            rollouts + unbegun,
            (*waiting.opened, *[step] * len(new)),
            (*waiting.positions, *new),
            tuple(postponed),
        ),
        position,
    )


def _next_chunk(sampler: Sampler, opened: Sequence[int], rollouts: Rollouts) -> Rollouts:
    """A chunk more of every open rollout."""
    config, engines = sampler.config, sampler.grid.engine
    samples, count = rollouts.samples, rollouts.count
    sampling = Sampling(config.rollout.temperature, 1.0, config.rollout.max_tokens)
    going_on = is_open(rollouts.facts, sampling.max_tokens)
    row_of = {(rollout.sample_id, rollout.index): (row, rollout) for row, rollout in rollouts.held.items()}
    sources = rollouts.facts["source"][::count].tolist()  # all of a group are one engine's
    steps = {sample.id: step for sample, step in zip(samples, opened, strict=True)}
    return sampler.draw(
        samples,
        count,
        partial.chunks(
            sampling,
            _partial(config).chunk_tokens,
            config.seed,
            steps,
            {name: rollout for name, (row, rollout) in row_of.items() if going_on[row]},
        ),
        already_drawn={name: rollout for name, (row, rollout) in row_of.items() if not going_on[row]},
        begun={place: source // engines.size for place, source in enumerate(sources) if source >= 0},
    )


def staleness_metrics(grid: ProcessGrid, rollouts: Rollouts, version: int, config: Config) -> dict[str, float]:
    """How many weight syncs before the current weights, `version`, the trained tokens were drawn: mean, most, the share of
    each; and the share of rollouts that weights of several versions drew."""
    most, updates = _partial(config).max_staleness, config.trainer.minibatches * config.trainer.epochs
    most += config.launch.generators is not None  # drawn while the last step was learned from
    tokens, cut = np.zeros(most + 1), 0
    for row, rollout in rollouts.held.items():
        if rollouts.facts["source"][row] == grid.rank:
            drawn = [segment for segment in rollout.segments if segment.logprobs is not None]
            for segment in drawn:
                tokens[-((segment.version - version) // updates)] += len(segment.ids)
            cut += len({segment.version for segment in drawn}) > 1
    *tokens, cut = np.sum(grid.all_gather([*tokens, cut]), axis=0).tolist()
    shares = np.array(tokens) / max(1.0, sum(tokens))
    metrics = {f"rollouts/staleness_{age}": share for age, share in enumerate(shares.tolist())}
    return metrics | {
        "rollouts/staleness_mean": float(shares @ np.arange(most + 1)),
        "rollouts/staleness_max": float(max(np.flatnonzero(shares), default=0)),
        "rollouts/partial_ratio": cut / len(rollouts),
    }


def check_prompts(config: Config, prompts: Prompts) -> None:
    """ValueError where a task's prompts come again, in the mean, before open ones are done."""
    opened, sizes = _partial(config).opened(config.trainer.prompts_per_step), Counter(s.task for s in prompts.train)
    weights = prompts.weights or {task: float(size) for task, size in sizes.items()}
    for task, weight in weights.items():
        again = sizes[task] * sum(weights.values()) / weight
        if again < opened:
            raise ValueError(
                f"`rollout.partial` keeps {opened} prompts open, and those of tasks.train.{task} come again after "
                f"{again:.0f}; lower rollout.partial.open_prompts or trainer.prompts_per_step, or give the task more prompts"
            )
