"""Held-out prompts, answered by the run's own engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import store
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.data import Rollout, Sample
from megatron_rl.evaluation import kept
from megatron_rl.evaluation.output import results_table, write_responses, write_results
from megatron_rl.evaluation.summary import TaskSummary, metrics_of, overall, summarize
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.trainer.report import Reporter
from megatron_rl.trainer.run import Run

Responses = tuple[Sequence[Sample], Sequence[Rollout]]


def evaluate(run: Run, step: int) -> dict[str, float]:
    """The metrics of every eval task under the engine's current weights (docs/metrics.md, Evaluation).

    A rollout counts as right where the reward `trainer.eval_reward` is at least `trainer.eval_threshold`.
    k = `trainer.eval_rollouts`; one rollout at temperature 0 is greedy decoding.
    """
    summaries, responses = _answer(run, step, {}, None)
    if step in (0, run.config.trainer.steps):
        for task, (samples, rollouts) in responses.items():
            run.report.eval_samples(step, task, samples, rollouts)
    return metrics_of(summaries, overall(run.config, summaries))


def _answer(
    run: Run, step: int, there: kept.Kept, keep: kept.Keeper | None
) -> tuple[list[TaskSummary], dict[str, Responses]]:
    trainer = run.config.trainer
    sampling = Sampling(trainer.eval_temperature, trainer.eval_top_p, run.config.rollout.max_tokens)
    summaries: list[TaskSummary] = []
    responses: dict[str, Responses] = {}
    for task, samples in run.sampler.prompts.eval.items():
        with run.phases.untimed("evaluate", f"evaluating {task}"):
            number, seed_step = trainer.eval_rollouts, evaluation_seed_step(step)
            rollouts = run.sampler.generate(samples, number, sampling, seed_step, there, keep)
            run.sampler.score(samples, rollouts)
        summaries.append(summarize(run.config, task, samples, rollouts))
        responses[task] = (samples, rollouts)
    return summaries, responses


def evaluation_seed_step(step: int) -> int:
    """What stands for the step in the seeds of an evaluation after it: apart from every training step's."""
    return -step - 1


def evaluate_only(run: Run, resume: str) -> None:
    """`megatron-rl evaluate` on the engine: the recipe's eval tasks on its model, or with the weights of a checkpoint.

    Args:
        resume: path of the checkpoint; `never`: the weights of the recipe's model.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    begin = time.monotonic()
    model: dict[str, Any] = {"door": "folder", "path": str(run.sampler.folder)}
    if resume != "never":
        folder = Path(resume)
        if problems := store.damage(folder, run.grid, but="optimizer."):
            raise CheckpointError(f"{folder} is not a whole checkpoint: {store.shown(problems)}")
        model = {"door": "checkpoint", "path": str(folder), "step": store.read_state(folder)["progress"]["step"]}
    there: kept.Kept = {}
    if run.grid.is_main:
        origin = kept.origin(run.config, {**model, "files": kept.files_of(Path(model["path"]))})
        there = take_up(
            run.report, origin, [sample for samples in run.sampler.prompts.eval.values() for sample in samples]
        )
    there = run.grid.broadcast(there)
    if resume != "never":
        run.report.phase(f"loading {folder.name}")
        store.load_model(folder, run.learner.actor.chunks)
    run.start_engine()
    run.report.begin("evaluation", 0, 1)
    path = run.report.run_dir / kept.FOLDER / f"engine{run.sampler.engine.index}.jsonl"
    keep = kept.Keeper(path) if run.sampler.engine.is_leader else None
    summaries, responses = _answer(run, 0, there, keep)
    if keep is not None:
        keep.close()
    finish(run.report, model, summaries, responses, run.sampler.take_counters(), begin)
    run.grid.barrier()
    if run.grid.is_main:
        kept.discard(run.report.run_dir / kept.FOLDER)


def take_up(report: Reporter, origin: Mapping[str, Any], samples: Sequence[Sample]) -> kept.Kept:
    """Responses of an interrupted evaluation that had the same origin; what else is in the run folder is moved away."""
    folder = report.run_dir / kept.FOLDER
    differing = kept.differences(folder, origin)
    if differing:
        report.warn(f"an interrupted evaluation is not continued, for it had another {', '.join(differing)}")
    report.start_over(but=None if differing else kept.FOLDER)
    kept.begin(folder, origin)
    there = kept.read(folder, samples)
    if there:
        report.note(f"continuing an interrupted evaluation: {len(there)} responses are in {folder}")
    return there


def finish(
    report: Reporter,
    model: dict[str, Any],
    summaries: Sequence[TaskSummary],
    responses: dict[str, Responses],
    counters: Mapping[str, float],
    begin: float,
) -> None:
    """Writes what an evaluation found: `metrics.jsonl`, `evaluation.json`, `samples/<task>.jsonl`; and prints the table.

    Args:
        counters: what slow rewards did, for `metrics.jsonl`.
        begin: when the evaluation began, on `time.monotonic`, in seconds.
    """
    config, run_dir = report.config, report.run_dir
    across = overall(config, summaries)
    report.log(0, {**metrics_of(summaries, across), **counters})
    if not report.active:
        return
    for summary in summaries:
        write_responses(run_dir / "samples" / f"{summary.task}.jsonl", *responses[summary.task], summary.right_if)
    write_results(run_dir / "evaluation.json", config, model, summaries, across, time.monotonic() - begin)
    report.console.print(results_table(config, summaries, across))
