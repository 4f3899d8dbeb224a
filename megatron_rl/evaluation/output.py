"""The results of `megatron-rl evaluate`: `evaluation.json` and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

import megatron_rl
from megatron_rl.config.schema import Config
from megatron_rl.evaluation.statistics import Interval
from megatron_rl.evaluation.summary import TaskSummary
from megatron_rl.runtime import disk

# What the table shows where a task has it: part of the name, heading, whether it is a share.
_COLUMNS = (
    ("win_rate", "win rate", True),
    ("win_rate_controlled", "at equal style", True),
    ("response_length", "length", False),
    ("exceed_share", "exceed", True),
    ("truncated_share", "cut", True),
    ("format_ratio", "format", True),
    ("pass_rate", "pass rate", True),
    ("bug_ratio", "bug", True),
)


def write_results(
    path: Path,
    config: Config,
    model: Mapping[str, object],
    summaries: Sequence[TaskSummary],
    across: Mapping[str, Interval],
    seconds: float,
) -> None:
    """`evaluation.json`, in one move. Every number of the table and its interval, and what it was measured with."""
    trainer = config.trainer
    sampling = {
        "responses_per_prompt": trainer.eval_rollouts,
        "temperature": trainer.eval_temperature,
        "top_p": trainer.eval_top_p,
        "max_tokens": config.rollout.max_tokens,
        "seed": config.seed,
    }
    content = {
        "megatron_rl": megatron_rl.__version__,
        "model": dict(model),
        **({"sampling": sampling} if config.evaluation.harness.name is None else {}),  # a harness samples as it does
        "confidence": config.evaluation.confidence,
        "seconds": round(seconds, 1),
        "failed_requests": sum(summary.failed for summary in summaries),
        "tasks": {
            summary.task: {
                "prompts": summary.prompts,
                "responses": summary.responses,
                "failed_requests": summary.failed,
                "unscored": summary.unscored,
                "right_if": {"reward": summary.right_if[0], "at_least": summary.right_if[1]},
                "sampling_stderr": summary.sampling_stderr,
            }
            for summary in summaries
        },
        "metrics": {
            name: asdict(estimate)
            for part in (*(summary.estimates for summary in summaries), across)
            for name, estimate in part.items()
        },
    }
    disk.replace(path, json.dumps(content, indent=1) + "\n")


def results_table(config: Config, summaries: Sequence[TaskSummary], across: Mapping[str, Interval]) -> Table:
    """One row per task, and one each for macro and micro where there are several tasks, or for a harness's own totals."""
    n = config.trainer.eval_rollouts
    share = config.evaluation.confidence
    rows: list[tuple[str, str, str, Mapping[str, Interval]]] = [
        (summary.task, str(summary.prompts), f"eval/{summary.task}", summary.estimates) for summary in summaries
    ]
    total = str(sum(summary.prompts for summary in summaries))
    if any(name.startswith("eval_macro/") for name in across):
        rows += [("all, macro", total, "eval_macro", across), ("all, micro", total, "eval_micro", across)]
    rows += [(name.split("/")[1], "", name.rpartition("/")[0], across) for name in across if name.startswith("eval/")]
    failed = {summary.task: summary.failed for summary in summaries}
    columns = ((f"pass@{n}", f"pass@{n}", True), *_COLUMNS) if n > 1 else _COLUMNS
    shown = [
        column for column in columns if any(f"{prefix}/{column[0]}" in estimates for _, _, prefix, estimates in rows)
    ]
    table = Table(title="Evaluation", title_justify="left")
    table.add_column("task")
    for heading in ("prompts", f"avg@{n}", f"{share:.0%} interval", *(heading for _, heading, _ in shown)):
        table.add_column(heading, justify="right")
    if any(failed.values()):
        table.add_column("failed", justify="right", style="bold red")
    for task, prompts, prefix, estimates in rows:
        right = estimates[f"{prefix}/avg@{n}"]
        cells = [task, prompts, f"{right.value:.1%}", _interval(right)]
        cells += [_cell(estimates.get(f"{prefix}/{name}"), is_share) for name, _, is_share in shown]
        if any(failed.values()):
            cells.append(str(failed.get(task, sum(failed.values()))))
        table.add_row(*cells)
    return table


def _interval(estimate: Interval) -> str:
    if estimate.low is None or estimate.high is None:
        return "–"
    return f"{estimate.low:.1%} – {estimate.high:.1%}"


def _cell(estimate: Interval | None, is_share: bool) -> str:
    if estimate is None:
        return "–"
    return f"{estimate.value:.1%}" if is_share else f"{estimate.value:.0f}"
