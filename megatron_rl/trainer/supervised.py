"""The loop of stages without rollouts: fine-tuning on demonstrations, and reward models on preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.update_result import UpdateResult
from megatron_rl.config.schema import SupervisedConfig
from megatron_rl.runtime.stop import StopRequested
from megatron_rl.tasks import make_order
from megatron_rl.trainer.run import Run


def run_stage(run: Run, section: SupervisedConfig, train: Callable[[], None], resume: str) -> None:
    """The whole of a command that is one such stage: continue from a checkpoint or begin, train, export."""
    if not run.resume(resume, section.optimizer, section.steps):
        run.learner.actor.start_optimizer(section.optimizer, section.steps)
    if run.state.step >= section.steps:
        run.report.note(f"already at step {run.state.step} of {section.steps}; to train on, raise its steps")
    train()
    run.checkpoints.export()
    run.checkpoints.finish()


def train_stage(
    run: Run,
    name: str,
    section: SupervisedConfig,
    tasks: Sequence[str],
    learn: Callable[[Sequence[int], bool], dict[str, float]],
    evaluate: Callable[[int], dict[str, float]],
) -> None:
    """The remaining steps of a stage, each on the next `section.batch_size` examples.

    Args:
        name: of the stage, on the terminal.
        tasks: every example's.
        learn: one optimizer step on the examples of these numbers; its metrics. Where the second argument is false the step
            is not logged, and those that ranks have to add up may be missing.
        evaluate: at a step that is due one, with the device the actor's, before and after; its metrics.
    """
    warming_up = run.state.warming_up
    order = make_order(tasks, _weights(run.sampler.prompts.weights, tasks), run.config.seed)
    run.report.begin(name, run.state.stage_step, section.steps)
    for step in range(run.state.stage_step + 1, section.steps + 1):
        try:
            run.stop.check(run.grid)
        except StopRequested:
            run.checkpoints.save_before_end(run.state)
            raise
        run.timer.start(step)
        indices = order.take((step - 1) * section.batch_size, section.batch_size)
        last = step == section.steps
        evaluates = not warming_up and (last or bool(section.eval_every and step % section.eval_every == 0))
        is_logged = step % section.log_every == 0 or evaluates or last
        with run.timer("update"):
            metrics = learn(indices, is_logged)
        with run.timer("checkpoint"):
            snapshot = run.checkpoints.capture(step, section.steps, warming_up)
        metrics |= run.timer.take()
        metrics |= run.checkpoints.metrics()
        run.state = replace(run.state, warm_up=step) if warming_up else replace(run.state, step=step)
        if evaluates:
            metrics |= evaluate(step)
        if is_logged:
            run.report.log_stage(name, section, step, metrics)
        if snapshot is not None:
            run.checkpoints.submit(run.state, snapshot, metrics)


def update_metrics(actor: Actor, result: UpdateResult, is_logged: bool) -> dict[str, float]:
    """Metrics of an optimizer step. `is_logged`: else without those that ranks have to add up."""
    load = actor.expert_load() if is_logged else {}
    return result.metrics.values() | load | {"actor/grad_norm": result.grad_norm, "actor/lr": result.learning_rate}


def _weights(weights: Mapping[str, float] | None, tasks: Sequence[str]) -> dict[str, float] | None:
    """Weights of the tasks that have examples."""
    return {name: weight for name, weight in weights.items() if name in tasks} if weights else None
