"""Held-out prompts: Avg@k and Pass@k."""

from __future__ import annotations

import math

from megatron_rl.rollout.sampling import Sampling
from megatron_rl.trainer.context import Run
from megatron_rl.trainer.sample import generate, score


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from c right ones among n (Chen et al. 2021, Eq. 1).

    Raises:
        ValueError: where k > n, or c is not between 0 and n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, there are {n}")
    if not 0 <= c <= n:
        raise ValueError(f"{c} right samples of {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def evaluate(run: Run, step: int) -> dict[str, float]:
    """`eval/<task>/avg@k` and `eval/<task>/pass@k` of every eval task, response lengths, and mean rewards.

    A rollout counts as right where the reward `trainer.eval_reward` (the recipe's first, if null) is at least
    `trainer.eval_threshold`. k = `trainer.eval_rollouts`; one rollout at temperature 0 is greedy decoding.
    """
    trainer, k = run.config.trainer, run.config.trainer.eval_rollouts
    sampling = Sampling(trainer.eval_temperature, trainer.eval_top_p, run.config.rollout.max_tokens)
    metrics: dict[str, float] = {}
    for task, samples in run.eval_samples.items():
        run.phases.announce(f"evaluating {task}")
        rollouts = generate(run, samples, k, sampling, step=-step - 1)  # seeds apart from the training steps'
        score(run, samples, rollouts)
        columns = list(rollouts[0].rewards)
        judge = trainer.eval_reward if trainer.eval_reward is not None else columns[0]
        right = [rollout.rewards[judge] >= trainer.eval_threshold for rollout in rollouts]
        counts = [sum(right[i : i + k]) for i in range(0, len(right), k)]
        metrics[f"eval/{task}/avg@{k}"] = sum(counts) / len(right)
        metrics[f"eval/{task}/pass@{k}"] = sum(pass_at_k(k, count, k) for count in counts) / len(counts)
        metrics[f"eval/{task}/response_length"] = sum(len(r.response_ids) for r in rollouts) / len(rollouts)
        metrics[f"eval/{task}/truncated_share"] = sum(r.finish_reason == "length" for r in rollouts) / len(rollouts)
        for column in columns:
            metrics[f"eval/{task}/reward/{column}"] = sum(r.rewards[column] for r in rollouts) / len(rollouts)
        if step in (0, trainer.steps):
            run.report.eval_samples(step, task, samples, rollouts)
    return metrics


def evaluate_only(run: Run, resume: str) -> None:
    """The whole of `megatron-rl evaluate`: the recipe's eval tasks on its model, into `metrics.jsonl`."""
    run.report.start_over()
    run.start_engine()
    run.report.begin("evaluation", 0, 1)
    run.report.log(0, evaluate(run, step=0))
