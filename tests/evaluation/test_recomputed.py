"""Every number of an evaluation, a second time from the samples that it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.schema import Config, EvaluationConfig, RewardConfig, TrainerConfig
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation.samples import write_responses
from megatron_rl.evaluation.summary import metrics_of, overall, summarize

from .recomputed import at_equal_style, battles, evaluation

N, STYLE = 4, ("style.length", "style.lists", "style.bold")
OPTIONS = {
    "length_limit": 30,
    "format_reward": "form",
    "bug_reward": "clean",
    "pass_rate_reward": "clean",
    "pairwise": ["as_a", "as_b"],
    "style": "style",
    "pass_k": [1, 2, 3],
}


def drawn(task: str, prompts: int, seed: int) -> tuple[list[Sample], list[Rollout]]:
    """Responses with every kind of reward; some without a verdict, one feature of style alike in all."""
    rng = np.random.default_rng(seed)
    samples = [Sample(f"{task}/{i}", task, "2+2=", [1, 2], answer="4") for i in range(prompts)]
    rollouts = []
    for sample in samples:
        for index in range(N):
            tokens = int(rng.integers(1, 60))
            rollout = Rollout.single_turn(sample, index, [0] * tokens, "length" if tokens > 50 else "stop")
            likes = rng.uniform(-1, 1)
            verdicts = rng.choice([-2.0, -1.0, 0.0, 1.0, 2.0], 2) if rng.random() < 0.5 else [np.sign(likes + 0.5)] * 2
            rollout.text, rollout.rewards = (
                "4",
                {
                    "correct": float(rng.random() < 0.6) if rng.random() < 0.9 else float("nan"),
                    "form": float(rng.choice([0.0, 0.5, 1.0])),
                    "clean": float(rng.random()) if rng.random() < 0.6 else 1.0,
                    "as_a": float(verdicts[0]),
                    "as_b": float(verdicts[1]) if rng.random() < 0.95 else float("nan"),
                    "style.length": float(likes),
                    "style.lists": -1 / 31,
                    "style.bold": float(rng.uniform(-1, 1)),
                },
            )
            rollouts.append(rollout)
    return samples, rollouts


def test_every_number_of_an_evaluation_a_second_time(tmp_path: Path) -> None:
    config = Config(
        run_dir="unused",
        rewards={
            "correct": RewardConfig(reward="math"),
            **{name: RewardConfig(reward="format") for name in ("form", "clean", "as_a", "as_b", "style")},
        },
        trainer=TrainerConfig(eval_rollouts=N, eval_temperature=1.0),
        evaluation=EvaluationConfig(**OPTIONS),  # type: ignore[arg-type]
    )
    tasks = {"sums": drawn("sums", 60, 3), "words": drawn("words", 25, 4)}
    summaries = [summarize(config, task, *answers) for task, answers in tasks.items()]
    across = overall(config, summaries)
    row = metrics_of(summaries, across)
    found: dict[str, dict[str, float]] = {}
    for task, (samples, rollouts) in tasks.items():
        path = tmp_path / f"{task}.jsonl"
        write_responses(path, samples, rollouts, ("correct", 1.0))
        records = [json.loads(line) for line in path.open()]
        own = found[task] = evaluation(records, "correct", 1.0, N, [1, 2, 3, 4], **OPTIONS)
        outcomes, styles = battles(records, OPTIONS["pairwise"], STYLE)  # type: ignore[arg-type]
        written = {
            name.removeprefix(f"eval/{task}/"): value for name, value in row.items() if name.startswith(f"eval/{task}/")
        }
        # Both are of 100 draws of the pool.
        error = outcomes.std() / np.sqrt(len(outcomes))
        assert written.pop("win_rate") == pytest.approx(outcomes.mean(), abs=error / 3)
        assert written.pop("win_rate_controlled") == pytest.approx(at_equal_style(outcomes, styles), abs=error)
        assert abs(outcomes.mean() - 0.5) > error / 3, "the pool says something"
        assert written == pytest.approx(own)
    weights = [60.0, 25.0]
    for name in {**found["sums"]}.keys() - {"stderr", "unscored"}:
        values = [found[task][name] for task in tasks]
        assert row[f"eval_macro/{name}"] == pytest.approx(np.mean(values)), name
        groups = [
            len({one.sample_id for one in rollouts if not np.isnan(one.rewards["correct"])})
            for _, rollouts in tasks.values()
        ]
        assert groups == weights
        if name.startswith(("avg@", "response_length", "truncated")):
            assert row[f"eval_micro/{name}"] == pytest.approx(np.average(values, weights=weights)), name
