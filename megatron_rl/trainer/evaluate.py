"""Held-out prompts, answered by the run's own engine, or by that of a server."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.algorithm_checks import reward_columns
from megatron_rl.config.schema import Config
from megatron_rl.data.rollout import Outcome, Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation import response_log as kept
from megatron_rl.evaluation.answers import (
    Answers,
    answer_tasks,
    guarded,
    resume_responses,
    seed_step,
    write_evaluation,
)
from megatron_rl.rewards import Scorer
from megatron_rl.rollout.endpoint_engine import EndpointEngine, find_server
from megatron_rl.rollout.engine import Failure
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime import exit_codes
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.tasks.loading import load_prompts
from megatron_rl.trainer.report import Reporter
from megatron_rl.trainer.sampler import Sampler
from megatron_rl.trainer.shown import fetch_to_rank0

if TYPE_CHECKING:
    from megatron_rl.trainer.run import Run

_SHOWN = 3  # reasons of failed requests that are printed


def evaluate(sampler: Sampler, report: Reporter, step: int, steps: int) -> dict[str, float]:
    """The metrics of every eval task under the engine's current weights (docs/metrics.md, Evaluation). `steps`: of the run.

    k = `trainer.eval_rollouts`; one rollout at temperature 0 is greedy decoding.
    """
    written = sampler.config.logging.samples_per_step if step in (0, steps) else 0
    answers = _answer(sampler, step, written)
    if written:
        for task, (samples, rollouts) in answers.responses.items():
            report.eval_samples(step, task, samples, rollouts)
    return answers.metrics()


def evaluates(config: Config, step: int) -> bool:
    """Whether the weights after a step are evaluated."""
    trainer = config.trainer
    return bool(trainer.eval_every and step % trainer.eval_every == 0) or step == trainer.steps


def _answer(
    sampler: Sampler,
    step: int,
    written: int,
    drawn: kept.Kept | None = None,
    on_drawn: Callable[[Rollout], None] | None = None,
    on_failed: Callable[[Failure], None] | None = None,
) -> Answers:
    """`written`: how many responses to each task rank 0 needs as text; the others as for `Sampler.generate`."""
    trainer = sampler.config.trainer
    sampling = Sampling(trainer.eval_temperature, trainer.eval_top_p, sampler.config.rollout.max_tokens)

    def answer(task: str, samples: Sequence[Sample]) -> tuple[Sequence[Outcome], Sequence[Rollout], int]:
        with sampler.timer.untimed("evaluate", f"evaluating {task}"):
            rollouts = sampler.generate(
                samples, trainer.eval_rollouts, sampling, seed_step(step), drawn, on_drawn, on_failed
            )
            sampler.score(rollouts)
            shown = fetch_to_rank0(sampler.grid, rollouts, written, sampler.tokenizer)
            return rollouts.outcomes(), shown, rollouts.unanswered

    return answer_tasks(sampler.config, sampler.prompts.eval, answer)


def evaluate_only(run: Run, resume: str) -> None:
    """`megatron-rl evaluate` on the engine: the recipe's eval tasks on its model, or with the weights of a checkpoint.
    `resume`: path of the checkpoint; `never`: the weights of the recipe's model.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    # Here: a machine that only asks a server has no Megatron-Core.
    from megatron_rl.checkpoint import store
    from megatron_rl.trainer import adapter_facts as adapters

    begin = time.monotonic()
    folder, model = run.sampler.folder, dict[str, object](backend="engine", path=str(run.sampler.folder))
    if resume != "never":
        folder = Path(resume)
        if problems := store.verify(folder, run.grid, skip_prefix="optimizer."):
            raise store.CheckpointError(f"{folder} is not a whole checkpoint: {store.summarize(problems)}")
        adapters.check(folder, run.checkpoints.adapters)
        model = {"backend": "checkpoint", "path": str(folder), "step": store.read_state(folder)["progress"]["step"]}
    tasks = run.sampler.prompts.eval
    if run.grid.is_main:
        resume_responses(run.report, {**model, "files": kept.files_of(folder)}, tasks)
    run.grid.barrier()
    drawn = kept.read(run.report.run_dir / kept.FOLDER, [sample for samples in tasks.values() for sample in samples])
    if resume != "never":
        run.report.phase(f"loading {folder.name}")
        store.load_model(folder, run.learner.actor.chunks)
    run.start_engine()
    run.report.begin("evaluation", 0, 1)
    path = run.report.run_dir / kept.FOLDER / f"engine{run.grid.engine.index}.jsonl"
    keep = kept.Keeper(path) if run.grid.engine.is_leader else None
    answers = _answer(run.sampler, 0, sys.maxsize, drawn, keep)
    if keep is not None:
        keep.close()
    write_evaluation(run.report, model, answers, run.sampler.take_counters(), begin)
    run.grid.barrier()
    if lost := sum(summary.failed for summary in answers.summaries):
        run.report.warn(f"{lost} conversations were lost; the same command holds these again, and no others")
    elif run.grid.is_main:
        kept.discard(run.report.run_dir / kept.FOLDER)


def evaluate_endpoint(report: Reporter, urls: Sequence[str], name: str | None) -> int:
    """`megatron-rl evaluate --endpoint`: the recipe's eval tasks on a served model; one process, no actor. Returns the exit
    code; `model.path` has the tokenizer.

    Args:
        urls: base URLs of equal servers.
        name: the model's name there; None: the only one.
    """
    return guarded(report, lambda: _verdict(report.config, *_evaluate_endpoint(report, urls, name)))


def _evaluate_endpoint(report: Reporter, urls: Sequence[str], name: str | None) -> tuple[list[str], int]:
    """Why requests failed, and how many were answered; a conversation counts as one."""
    from transformers import AutoTokenizer

    begin, config = time.monotonic(), report.config
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    server = find_server(urls, name, config.evaluation.endpoint, longest)
    report.phase("loading the tasks")
    assert config.model.path is not None  # checked by the command
    folder = Path(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=False)
    prompts = load_prompts(config, tokenizer, report.note, training=False)
    served = {"name": server.name, "root": server.root, "tokenizer": kept.files_of(folder)}
    drawn = resume_responses(report, served, prompts.eval)
    report.begin("evaluation", 0, 1)
    scorer = Scorer(config.rewards, reward_columns(config))
    for samples in prompts.eval.values():
        scorer.check(samples)
        for doubt in scorer.doubts(samples):
            report.warn(doubt)
    scorer.open(report.run_dir, rank=0, world=1)
    sampler = Sampler(config, ALONE, folder, tokenizer, prompts, scorer, report, StepTimer(report.phase))
    sampler.use(EndpointEngine(server, config.evaluation.endpoint))
    keeper = kept.Keeper(report.run_dir / kept.FOLDER / "engine0.jsonl")
    total, answered, failures = (
        config.trainer.eval_rollouts * sum(map(len, prompts.eval.values())),
        len(drawn),
        list[str](),
    )

    def show() -> None:
        report.phase(f"{answered} of {total} requests answered, {len(failures)} failed")

    def on_drawn(rollout: Rollout) -> None:
        nonlocal answered
        keeper(rollout)
        if rollout.failed_by == "infrastructure":
            failures.append("a conversation that was lost")
        else:
            answered += 1
        show()

    def on_failed(failure: Failure) -> None:
        failures.append(failure.reason)
        show()

    try:
        answers = _answer(sampler, 0, sys.maxsize, drawn, on_drawn, on_failed)
    finally:
        keeper.close()
        sampler.close()
    for summary in answers.summaries:
        report.note(f"{summary.task}: {summary.responses} responses, {summary.failed} requests failed")
    model = {
        "backend": "endpoint",
        "urls": list(server.urls),
        "served_name": server.name,
        "tokenizer": config.model.path,
    }
    write_evaluation(report, model, answers, sampler.take_counters(), begin)
    if not failures:
        kept.discard(report.run_dir / kept.FOLDER)
    return failures, sum(summary.responses for summary in answers.summaries)


def _verdict(config: Config, failures: Sequence[str], answered: int) -> int:
    """Reports failed requests, which no metric includes; more than the recipe tolerates make the command fail."""
    if not failures:
        return exit_codes.OK
    share, allowed = len(failures) / (len(failures) + answered), config.evaluation.endpoint.max_failed_share
    reasons = Counter(failures).most_common(_SHOWN)
    shown = "; ".join(f"{count} x {reason}" for reason, count in reasons)
    print(
        f"megatron-rl: {len(failures)} requests ({share:.1%}) stayed unanswered and are in none of the numbers: {shown}"
        + (f" (more than evaluation.endpoint.max_failed_share = {allowed:g})" if share > allowed else "")
        + "; the same command asks for these again, and for no others",
        file=sys.stderr,
    )
    return exit_codes.FAILED if share > allowed else exit_codes.OK
