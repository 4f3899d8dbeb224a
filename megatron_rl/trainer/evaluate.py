"""Held-out prompts, answered by the run's own engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.checkpoint import store
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.data.rollout import Outcome, Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation import response_log as kept
from megatron_rl.evaluation.run import Answers, answer_tasks, resume_responses, seed_step, write_evaluation
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.trainer import adapters
from megatron_rl.trainer.run import Run
from megatron_rl.trainer.shown import fetch_to_rank0


def evaluate(run: Run, step: int) -> dict[str, float]:
    """The metrics of every eval task under the engine's current weights (docs/metrics.md, Evaluation).

    k = `trainer.eval_rollouts`; one rollout at temperature 0 is greedy decoding.
    """
    written = run.config.logging.samples_per_step if step in (0, run.config.trainer.steps) else 0
    answers = _answer(run, step, written)
    if written:
        for task, (samples, rollouts) in answers.responses.items():
            run.report.eval_samples(step, task, samples, rollouts)
    return answers.metrics()


def _answer(
    run: Run, step: int, written: int, drawn: kept.Kept | None = None, keep: kept.Keeper | None = None
) -> Answers:
    """`written`: how many responses to each task rank 0 needs as text."""
    trainer = run.config.trainer
    sampling = Sampling(trainer.eval_temperature, trainer.eval_top_p, run.config.rollout.max_tokens)

    def answer(task: str, samples: Sequence[Sample]) -> tuple[Sequence[Outcome], Sequence[Rollout], int]:
        with run.timer.untimed("evaluate", f"evaluating {task}"):
            rollouts = run.sampler.generate(samples, trainer.eval_rollouts, sampling, seed_step(step), drawn, keep)
            run.sampler.score(rollouts)
            return rollouts.outcomes(), fetch_to_rank0(run.grid, rollouts, written, run.sampler.tokenizer), 0

    return answer_tasks(run.config, run.sampler.prompts.eval, answer)


def evaluate_only(run: Run, resume: str) -> None:
    """`megatron-rl evaluate` on the engine: the recipe's eval tasks on its model, or with the weights of a checkpoint.
    `resume`: path of the checkpoint; `never`: the weights of the recipe's model.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    begin = time.monotonic()
    folder, model = run.sampler.folder, dict[str, object](door="folder", path=str(run.sampler.folder))
    if resume != "never":
        folder = Path(resume)
        if problems := store.verify(folder, run.grid, skip_prefix="optimizer."):
            raise CheckpointError(f"{folder} is not a whole checkpoint: {store.summarize(problems)}")
        adapters.check(folder, run.checkpoints.adapters)
        model = {"door": "checkpoint", "path": str(folder), "step": store.read_state(folder)["progress"]["step"]}
    tasks = run.sampler.prompts.eval
    if run.grid.is_main:
        resume_responses(run.report, {**model, "files": kept.files_of(folder)}, tasks)
    run.grid.barrier()
    there = kept.read(run.report.run_dir / kept.FOLDER, [sample for samples in tasks.values() for sample in samples])
    if resume != "never":
        run.report.phase(f"loading {folder.name}")
        store.load_model(folder, run.learner.actor.chunks)
    run.start_engine()
    run.report.begin("evaluation", 0, 1)
    path = run.report.run_dir / kept.FOLDER / f"engine{run.grid.engine.index}.jsonl"
    keep = kept.Keeper(path) if run.grid.engine.is_leader else None
    answers = _answer(run, 0, sys.maxsize, there, keep)
    if keep is not None:
        keep.close()
    write_evaluation(run.report, model, answers, run.sampler.take_counters(), begin)
    run.grid.barrier()
    if run.grid.is_main:
        kept.discard(run.report.run_dir / kept.FOLDER)
