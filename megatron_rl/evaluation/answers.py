"""Shared steps of evaluations by an engine (`trainer.evaluate`) or by a harness (`evaluation.harnessed`)."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console

from megatron_rl.agents.failures import AgentsFailed
from megatron_rl.config.schema import Config
from megatron_rl.data.rollout import Outcome, Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation import response_log as kept
from megatron_rl.evaluation.output import results_table, write_results
from megatron_rl.evaluation.samples import write_responses
from megatron_rl.evaluation.statistics import Interval
from megatron_rl.evaluation.summary import TaskSummary, metrics_of, overall, summarize
from megatron_rl.rewards import RewardError, ScoringStats
from megatron_rl.runtime import exit_codes
from megatron_rl.runtime.http import EndpointError


class Log(Protocol):
    """Where an evaluation writes its messages and metrics."""

    config: Config
    run_dir: Path
    active: bool  # this process writes files
    console: Console

    def phase(self, name: str) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def begin(self, stage: str, done: int, total: int) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def start_over(self, keep: str | None = None) -> None: ...
    def lost_conversations(self, reasons: Sequence[Counter[str]]) -> None: ...
    def missing_scores(self, scored: ScoringStats) -> None: ...
    def summary(self) -> None: ...
    def close(self) -> None: ...


Answer = Callable[[str, Sequence[Sample]], tuple[Sequence[Outcome], Sequence[Rollout], int]]
"""A task's name and prompts to what is known of all scored rollouts, those that this process writes, and the number of
requests that failed."""


@dataclass
class Answers:
    """The metrics of all tasks, and the scored responses that this process writes."""

    config: Config
    summaries: list[TaskSummary] = field(default_factory=list)
    responses: dict[str, tuple[Sequence[Sample], Sequence[Rollout]]] = field(default_factory=dict)  # by task
    totals: dict[str, Interval] | None = None  # a harness's own, over several of its sets; None: ours

    def across(self) -> dict[str, Interval]:
        return overall(self.config, self.summaries) if self.totals is None else self.totals

    def metrics(self) -> dict[str, float]:
        """The metrics of docs/metrics.md, Evaluation."""
        return metrics_of(self.summaries, self.across())


def guarded(log: Log, evaluate: Callable[[], int]) -> int:
    """The exit code of an evaluation, or of what ended it, which is told."""
    try:
        code = evaluate()
    except np.linalg.LinAlgError:  # a ValueError, and no recipe's fault: the traceback says more
        log.close()
        raise
    except (ValueError, OSError, EndpointError, RewardError, AgentsFailed) as error:
        log.close()
        print(f"megatron-rl: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT if isinstance(error, ValueError) else exit_codes.FAILED
    except KeyboardInterrupt:
        log.close()
        print("megatron-rl: stopped; the same command continues with the responses that are there", file=sys.stderr)
        return 128 + signal.SIGINT
    log.summary()
    log.close()
    return code


def answer_tasks(config: Config, tasks: Mapping[str, Sequence[Sample]], answer: Answer) -> Answers:
    """Answers the prompts of every task and summarises the responses.

    A rollout counts as right where the reward `trainer.eval_reward` is at least `trainer.eval_threshold`.
    """
    answers = Answers(config)
    for task, samples in tasks.items():
        outcomes, written, failed = answer(task, samples)
        answers.summaries.append(summarize(config, task, samples, outcomes, failed))
        answers.responses[task] = (samples, written)
    return answers


def seed_step(step: int) -> int:
    """The step number in the seeds of an evaluation after `step`, different from every training step's."""
    return -step - 1


def resume_responses(
    log: Log, model: Mapping[str, object], tasks: Mapping[str, Sequence[Sample]]
) -> dict[tuple[str, int], Rollout]:
    """Responses of an interrupted evaluation of the same model and settings. Other outputs in the run folder are archived."""
    folder = log.run_dir / kept.FOLDER
    origin = kept.origin(log.config, model)
    differing = kept.differences(folder, origin)
    if differing:
        log.warn(f"an interrupted evaluation is not continued, because of another {', '.join(differing)}")
    log.start_over(keep=None if differing else kept.FOLDER)
    kept.begin(folder, origin)
    drawn = kept.read(folder, [sample for samples in tasks.values() for sample in samples])
    if drawn:
        log.note(f"continuing an interrupted evaluation: {len(drawn)} responses are in {folder}")
    return drawn


def write_evaluation(
    log: Log, model: Mapping[str, object], answers: Answers, counters: Mapping[str, float], began: float
) -> None:
    """Writes `metrics.jsonl`, `evaluation.json` and `samples/<task>.jsonl`, and prints the table.

    Args:
        counters: metrics of the rewards.
        began: start of the evaluation, by `time.monotonic`.
    """
    config, run_dir = log.config, log.run_dir
    log.log(0, {**answers.metrics(), **counters})
    if not log.active:
        return
    across = answers.across()
    for summary in answers.summaries:
        if summary.task in answers.responses:
            written = answers.responses[summary.task]
            write_responses(run_dir / "samples" / f"{summary.task}.jsonl", *written, summary.right_if)
    write_results(run_dir / "evaluation.json", config, model, answers.summaries, across, time.monotonic() - began)
    log.console.print(results_table(config, answers.summaries, across))
