"""Prompts to scored rollouts: the sampling half of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.algorithms.shaping import signal_groups
from megatron_rl.data import RewardTable, Rollout, Sample
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.trainer.context import Run


def next_prompts(run: Run, count: int) -> list[Sample]:
    """The next `count` training prompts; moves the run's position."""
    indices = run.order.take(run.state.position, count)
    run.state.position += count
    return [run.train_samples[index] for index in indices]


def generate(run: Run, samples: Sequence[Sample], count: int, sampling: Sampling, step: int) -> list[Rollout]:
    """`count` rollouts per sample, decoded; ordered by sample, then index; the same on every rank."""
    rollouts = run.engine.generate(samples, count, sampling, step)
    texts = run.tokenizer.batch_decode(
        [rollout.response_ids for rollout in rollouts], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    for rollout, text in zip(rollouts, texts, strict=True):
        rollout.text = text
    return rollouts


def score(run: Run, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> None:
    """Fills in `rollout.rewards`. The work is divided over all ranks; every rank ends with all numbers."""
    by_id = {sample.id: sample for sample in samples}
    own = rollouts[run.grid.rank :: run.grid.world]
    before = run.scorer.timeouts()
    rows = run.scorer.score(
        [rollout.text for rollout in own],
        [by_id[rollout.sample_id] for rollout in own],
        [rollout.finish_reason for rollout in own],
        [len(rollout.response_ids) for rollout in own],
    )
    timed_out = {column: count - before[column] for column, count in run.scorer.timeouts().items()}
    for rank, (part, timeouts) in enumerate(run.grid.all_gather((rows, timed_out))):
        for rollout, rewards in zip(rollouts[rank :: run.grid.world], part, strict=True):
            rollout.rewards = rewards
        for column, count in timeouts.items():
            seen = run.counters.get(f"reward_timeouts/{column}", 0)
            run.counters[f"reward_timeouts/{column}"] = seen + count


def sample_step(run: Run, step: int) -> tuple[list[Sample], list[Rollout]]:
    """A step's prompts with their scored rollouts.

    With dynamic sampling (`algorithm.resample_rounds`) groups without signal are replaced by further prompts until
    `trainer.prompts_per_step` groups have one or the rounds are used up; groups in excess are left out.
    """
    config = run.config
    wanted, group_size = config.trainer.prompts_per_step, config.rollout.group_size
    sampling = Sampling(config.rollout.temperature, 1.0, config.rollout.max_tokens)
    kept_samples: list[Sample] = []
    kept_rollouts: list[Rollout] = []
    rounds = config.algorithm.resample_rounds if config.algorithm.drop_no_signal_groups else 0
    for round_ in range(rounds + 1):
        samples = _distinct(next_prompts(run, wanted), kept_samples)
        with run.phases("generate"):
            rollouts = generate(run, samples, group_size, sampling, step)
        with run.phases("reward"):
            score(run, samples, rollouts)
        run.counters["rollouts/sampled"] = run.counters.get("rollouts/sampled", 0) + len(rollouts)
        if not rounds:
            return samples, rollouts
        signal = signal_groups(reward_table(run, samples, rollouts), config.algorithm.signal_rewards).tolist()
        for i, sample in enumerate(samples):
            if signal[i] and len(kept_samples) < wanted:
                kept_samples.append(sample)
                kept_rollouts += rollouts[i * group_size : (i + 1) * group_size]
        run.counters["rollouts/rounds"] = round_ + 1
        if len(kept_samples) == wanted:
            break
    if not kept_samples:  # nothing to learn from in any round: the step reports it and leaves the weights alone
        return samples, rollouts
    return kept_samples, kept_rollouts


def _distinct(samples: Sequence[Sample], taken: Sequence[Sample]) -> list[Sample]:
    """A prompt comes once per step, also where the step is longer than the epoch: groups are formed by prompt id."""
    seen = {sample.id for sample in taken}
    return [sample for sample in samples if not (sample.id in seen or seen.add(sample.id))]  # type: ignore[func-returns-value]


def reward_table(
    run: Run, samples: Sequence[Sample], rollouts: Sequence[Rollout], greedy: Sequence[Rollout] | None = None
) -> RewardTable:
    """The step's rewards, [prompts, group size, columns]; float64. `greedy`: one scored greedy rollout per sample."""
    n, m = len(samples), run.config.rollout.group_size
    names = tuple(rollouts[0].rewards)
    values = torch.tensor([[rollout.rewards[name] for name in names] for rollout in rollouts], dtype=torch.float64)
    lengths = torch.tensor([len(rollout.response_ids) for rollout in rollouts], dtype=torch.float64)
    weights = {column: config.weight for column, config in run.scorer.configs.items()}
    return RewardTable(
        values.view(n, m, -1),
        names,
        weights={name: weights[name.partition(".")[0]] for name in names},
        lengths=lengths.view(n, m),
        greedy=None
        if greedy is None
        else torch.tensor([[r.rewards[name] for name in names] for r in greedy], dtype=torch.float64),
    )


def greedy_baseline(run: Run, samples: Sequence[Sample], step: int) -> list[Rollout] | None:
    """One scored greedy rollout per sample where the estimator asks for it (ReMax)."""
    if not run.algorithm.estimator.needs.greedy:
        return None
    with run.phases("generate"):
        rollouts = generate(run, samples, 1, Sampling(0.0, 1.0, run.config.rollout.max_tokens), step)
    with run.phases("reward"):
        score(run, samples, rollouts)
    return rollouts


def reward_metrics(table: RewardTable) -> dict[str, float]:
    """`reward/mean` and `reward/std` of the weighted sum of all columns, over all rollouts."""
    total = sum(table.weight(name) * table.column(name) for name in table.names)
    assert isinstance(total, torch.Tensor)
    return {"reward/mean": float(total.mean()), "reward/std": float(total.std(correction=0))}


def response_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = np.array([len(rollout.response_ids) for rollout in rollouts], dtype=np.float64)
    reasons = [rollout.finish_reason for rollout in rollouts]
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated_share": reasons.count("length") / len(reasons),
        "prompt_length/mean": float(np.mean([len(rollout.prompt_ids) for rollout in rollouts])),
    }


def truncated(rollouts: Sequence[Rollout], table: RewardTable) -> torch.Tensor:
    """bool [prompts, group size]: rollouts that were cut at the token limit."""
    return torch.tensor([rollout.finish_reason == "length" for rollout in rollouts]).view(table.mask.shape)
