"""From scored responses to the named numbers, counted by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.schema import Config, EvaluationConfig, RewardConfig, TrainerConfig
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation.output import results_table, write_results
from megatron_rl.evaluation.samples import write_responses
from megatron_rl.evaluation.summary import metrics_of, overall, passes, summarize

NAN = float("nan")


def config(rollouts: int = 2, **evaluation: object) -> Config:
    return Config(
        run_dir="unused",
        rewards={
            "correct": RewardConfig(reward="math"),
            "clean": RewardConfig(reward="code_bug", tasks=["sums"]),
            "judge": RewardConfig(reward="judge", when_needed=True),
        },
        trainer=TrainerConfig(eval_rollouts=rollouts, eval_temperature=1.0),
        evaluation=EvaluationConfig(**evaluation),  # type: ignore[arg-type]
    )


def responses(task: str, *prompts: list[tuple[float, float, int]]) -> tuple[list[Sample], list[Rollout]]:
    """Per prompt its responses: correct, clean, tokens. Above 100 tokens they are cut."""
    samples = [Sample(f"{task}/{i}", task, "2+2=", [1, 2], answer="4") for i in range(len(prompts))]
    rollouts = []
    for sample, prompt in zip(samples, prompts, strict=True):
        for index, (correct, clean, tokens) in enumerate(prompt):
            reason = "length" if tokens > 100 else "stop"
            rollouts.append(Rollout.single_turn(sample, index, [0] * tokens, reason))
            rollouts[-1].text, rollouts[-1].rewards = "4", {"correct": correct, "clean": clean}
    return samples, rollouts


SUMS = [(1.0, 1.0, 10), (0.0, 0.0, 50)], [(0.0, 1.0, 120), (0.0, 0.5, 20)], [(1.0, 1.0, 10), (1.0, 1.0, 30)]


def test_every_number_of_a_task() -> None:
    recipe = config(length_limit=20, bug_reward="clean", pass_rate_reward="clean", format_reward="clean")
    summary = summarize(recipe, "sums", *responses("sums", *SUMS))
    values = {name.removeprefix("eval/sums/"): estimate.value for name, estimate in summary.estimates.items()}
    assert values == pytest.approx(
        {
            "avg@2": 3 / 6,
            "pass@1": 3 / 6,
            "pass@2": 2 / 3,
            "response_length": 40,
            "truncated_share": 1 / 6,
            "exceed_share": 3 / 6,
            "format_ratio": 4 / 6,
            "bug_ratio": 2 / 6,
            "pass_rate": 4.5 / 6,
            "reward/correct": 3 / 6,
            "reward/clean": 4.5 / 6,
        }
    )
    assert (summary.prompts, summary.responses, summary.failed, summary.unscored) == (3, 6, 0, 0)
    assert summary.right_if == ("correct", 1.0)
    assert summary.sampling_stderr == pytest.approx(math.sqrt(0.25) / 3)


def test_a_reward_of_other_tasks_is_not_reported_as_zero() -> None:
    summary = summarize(config(bug_reward="clean"), "words", *responses("words", *SUMS))
    assert not [name for name in summary.estimates if "clean" in name or "bug" in name]


def test_failed_requests_are_in_no_number() -> None:
    samples, rollouts = responses("sums", [(1.0, 1.0, 10), (0.0, 1.0, 10)], [(1.0, 1.0, 10)], [])
    summary = summarize(config(), "sums", samples, rollouts, failed=3)
    assert summary.estimates["eval/sums/avg@2"].value == pytest.approx(0.75)
    assert summary.estimates["eval/sums/avg@2"].prompts == 2
    assert summary.estimates["eval/sums/pass@2"].prompts == 1
    assert summary.failed == 3


def test_responses_without_a_verdict_are_in_no_number() -> None:
    summary = summarize(config(1), "sums", *responses("sums", [(1.0, 1.0, 10)], [(NAN, 1.0, 10)], [(0.0, NAN, 10)]))
    assert summary.estimates["eval/sums/avg@1"].value == pytest.approx(0.5)
    assert summary.estimates["eval/sums/reward/clean"].value == pytest.approx(1.0)
    assert summary.unscored == 1
    assert metrics_of([summary], {})["eval/sums/unscored"] == 1


def test_a_response_without_a_verdict_is_null_in_the_samples(tmp_path: Path) -> None:
    answers = responses("sums", [(1.0, 1.0, 10)], [(NAN, 1.0, 10)])
    write_responses(tmp_path / "sums.jsonl", *answers, ("correct", 1.0))
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "sums.jsonl").open()]
    assert [(row["right"], row["rewards"]["correct"]) for row in rows] == [(True, 1.0), (None, None)]


@pytest.mark.parametrize("prompts", [[[]], [[(NAN, 1.0, 10)]]])
def test_nothing_to_evaluate_is_an_error(prompts: list[list[tuple[float, float, int]]]) -> None:
    with pytest.raises(ValueError, match="sums"):
        summarize(config(1), "sums", *responses("sums", *prompts), failed=1)


@pytest.mark.parametrize(("n", "given", "expected"), [(1, None, [1]), (6, None, [1, 2, 4, 6]), (8, [3], [3, 8])])
def test_the_k_of_pass_at_k(n: int, given: list[int] | None, expected: list[int]) -> None:
    assert passes(config(n, pass_k=given)) == expected


def test_macro_counts_tasks_and_micro_counts_prompts(tmp_path: Path) -> None:
    recipe = config(bug_reward="clean")
    parts = {
        "sums": responses("sums", *SUMS),
        "words": responses("words", [(0.0, 0.0, 10), (0.0, 0.0, 10)]),
    }
    summaries = [summarize(recipe, task, *answers) for task, answers in parts.items()]
    across = overall(recipe, summaries)
    assert across["eval_macro/avg@2"].value == pytest.approx((0.5 + 0) / 2)
    assert across["eval_micro/avg@2"].value == pytest.approx(3 / 8)
    assert "eval_macro/bug_ratio" not in across, "only one of the tasks has it"
    assert overall(recipe, summaries[:1]) == {}

    write_results(tmp_path / "evaluation.json", recipe, {"backend": "engine"}, summaries, across, 1.0)
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["metrics"]["eval/sums/avg@2"]["value"] == 0.5
    assert content["tasks"]["words"]["right_if"] == {"reward": "correct", "at_least": 1.0}
    console = Console(record=True, width=160)
    console.print(results_table(recipe, summaries, across))
    shown = console.export_text()
    assert all(word in shown for word in ("sums", "words", "all, macro", "all, micro", "50.0%", "95% interval", "bug"))
    assert "failed" not in shown

    write_responses(tmp_path / "samples" / "sums.jsonl", *parts["sums"], summaries[0].right_if)
    records = [json.loads(line) for line in (tmp_path / "samples" / "sums.jsonl").read_text().splitlines()]
    assert [record["right"] for record in records] == [True, False, False, False, True, True]
