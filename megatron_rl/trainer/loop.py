"""The training loop: sample, score, estimate, update, sync."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.runtime.stop import StopRequested
from megatron_rl.trainer.evaluate import evaluates
from megatron_rl.trainer.record import TokenLog, record_step
from megatron_rl.trainer.record_texts import write_texts
from megatron_rl.trainer.run import Run
from megatron_rl.trainer.sft import warm_up
from megatron_rl.trainer.shown import decode, fetch_to_rank0, remarks_of
from megatron_rl.trainer.step_metrics import (
    conversation_metrics,
    response_metrics,
    reward_metrics,
    throughput,
    token_reward_metrics,
)


def train(run: Run, resume: str) -> None:
    """RL from the recipe's start (after its SFT warm-up, if it has one) or from a checkpoint, to `trainer.steps`."""
    config, learner, checkpoints = run.config, run.learner, run.checkpoints
    resumed = run.resume(resume, config.actor.optimizer, learner.total_updates) and not run.state.warming_up
    if not resumed:
        if config.sft.steps:
            warm_up(run)
        learner.start()
    if run.state.step >= config.trainer.steps:
        run.report.note(
            f"already at step {run.state.step} of {config.trainer.steps}; to train on, raise trainer.steps; to start again, "
            "choose another run_dir or --resume never"
        )
        checkpoints.export()  # the previous attempt's may have failed
        return
    run.start_engine(evaluates=not resumed)
    run.report.begin("RL", run.state.step, config.trainer.steps)
    if not resumed:  # every checkpoint, also that of step 0, is written after this
        scores = run.evaluate(step=0)
        run.report.log(0, scores | run.take_counters() | run.timer.memory.metrics())
        if config.checkpoint.every:
            run.hand_device_to_actor()
            checkpoints.save(run.state, scores)
            if run.generators is None:
                run.hand_device_to_engine()
    while run.state.step < config.trainer.steps:
        try:
            run.check_stop()
            step(run)
        except StopRequested:
            run.hand_device_to_actor()
            checkpoints.save_before_end(run.state)
            raise
    run.hand_device_to_actor()
    checkpoints.export()
    checkpoints.finish()


def step(run: Run) -> None:
    """One step: from the next prompts to an engine that holds the new weights. It is committed with `run.state`.

    Raises:
        StopRequested: between sampling and learning, when nothing has changed yet.
    """
    config, number = run.config, run.state.step + 1
    sampler, learner = run.sampler, run.learner
    run.timer.start(number)

    batch, state = run.next_batch(number)  # estimators and weights change from here on, so the step is finished
    rollouts = batch.rollouts

    with run.timer("switch"):
        run.hand_device_to_actor()
    table = sampler.reward_table(rollouts, batch.greedy)
    with run.timer("estimate"):
        estimate = learner.compute_advantages(table, rollouts)
        train_batch = learner.train_batch(rollouts, estimate)
    log = TokenLog() if run.report.records(number) else None
    every = config.logging.gradient_variance_every
    learned = learner.update(
        train_batch, estimate.clip_range, log, measure_variance=bool(every) and number % every == 0
    )

    with run.timer("checkpoint"):
        snapshot = run.checkpoints.capture(number, config.trainer.steps)
    if run.generators is not None and number < config.trainer.steps:
        with run.timer("wait"):
            state = run.generators.next_batch(saves=snapshot is not None)  # was drawn meanwhile
    scored = difference = None
    if number % config.rollout.sync_check_every == 0:
        with run.timer("sync_check"):
            scored = run.score_by_actor(rollouts)
    with run.timer("sync"):
        run.hand_device_to_engine()
    if scored is not None:
        with run.timer("sync_check"):
            difference = run.sync.check(scored)
    run.state = replace(state, step=number)

    seconds = run.timer.take() | dict(batch.seconds)
    metrics = estimate.metrics | reward_metrics(table, rollouts) | response_metrics(rollouts) | learned
    metrics |= conversation_metrics(run.grid, rollouts)
    metrics |= token_reward_metrics(rollouts, config.rewards) | run.checkpoints.metrics()
    metrics |= difference.metrics() if difference is not None else {}
    metrics |= throughput(rollouts, seconds) | seconds
    if evaluates(config, number):
        metrics |= run.evaluate(number)
    metrics |= run.take_counters(batch) | run.timer.memory.metrics()
    run.report.log(number, metrics)
    if (count := config.logging.samples_per_step) > 0:
        shown = fetch_to_rank0(run.grid, rollouts, count, sampler.tokenizer)
        details = remarks_of(sampler.scorer, sampler.tokenizer, rollouts.samples, shown, with_pieces=log is not None)
        run.report.samples(number, rollouts.samples, shown, estimate.advantages, estimate.turns, details)
    if log is not None:
        path = run.run_dir / "rollouts" / f"step_{number}.npz"
        decode(sampler.tokenizer, [*rollouts.held.values()])  # no text comes from other ranks
        write_texts(path, run.grid, rollouts)
        record_step(path, run.grid, rollouts, table, estimate, log)
    if snapshot is not None:
        run.checkpoints.submit(run.state, snapshot, metrics)
