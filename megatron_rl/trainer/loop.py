"""The training loop: sample, score, estimate, update, sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.data import Rollout
from megatron_rl.runtime.stop import StopRequested
from megatron_rl.trainer.checkpointing import (
    capture,
    export,
    finish_saves,
    save,
    save_before_end,
    save_metrics,
    submit,
)
from megatron_rl.trainer.context import Run
from megatron_rl.trainer.evaluate import evaluate
from megatron_rl.trainer.minibatch import train_batch
from megatron_rl.trainer.record import TokenLog
from megatron_rl.trainer.resume import load_checkpoint
from megatron_rl.trainer.sample import (
    greedy_baseline,
    response_metrics,
    reward_metrics,
    reward_table,
    sample_step,
    truncated,
)
from megatron_rl.trainer.sft import supervise
from megatron_rl.trainer.update import reference_kl, update


def train(run: Run, resume: str) -> None:
    """RL from the recipe's start (after its SFT warm-up, if it has one) or from a checkpoint, to `trainer.steps`."""
    config = run.config
    total_updates = config.trainer.steps * config.trainer.minibatches * config.trainer.epochs
    resumed = load_checkpoint(run, resume, config.actor.optimizer, total_updates) and not run.warming_up
    if not resumed:
        if config.sft.steps:
            supervise(run)
        if run.algorithm.needs_reference:
            run.actor.keep_reference()
        run.actor.start_optimizer(config.actor.optimizer, total_updates)
    state = run.state  # a checkpoint brings its own
    if state.step >= config.trainer.steps:
        run.report.note(
            f"all {config.trainer.steps} steps were done before; to train on, raise trainer.steps; to start again, choose "
            "another run_dir or --resume never"
        )
        export(run)  # the one before may have failed
        return
    run.start_engine()
    run.report.begin("RL", state.step, config.trainer.steps)
    if not resumed:  # a checkpoint, also that of step 0, was written after this
        scores = evaluate(run, step=0)
        run.report.log(0, scores | run.take_counters())
        if config.checkpoint.every:
            run.hand_device_to_actor()
            save(run, scores)
            run.hand_device_to_engine()
    while state.step < config.trainer.steps:
        position, estimator = state.position, run.algorithm.state_dict()
        try:
            run.stop.check(run.grid)
            step(run)
        except StopRequested:  # raised between steps, or by a step that has changed nothing yet but these two
            state.position = position
            run.algorithm.load_state_dict(estimator)
            run.hand_device_to_actor()
            save_before_end(run)
            raise
    export(run)
    finish_saves(run)


def step(run: Run) -> None:
    """One step: from the next prompts to an engine that holds the new weights.

    Raises:
        StopRequested: between two phases, as long as the weights are those of the step before.
    """
    config, number = run.config, run.state.step + 1
    run.phases.start(number)

    samples, rollouts = sample_step(run, number)
    run.stop.check(run.grid)
    greedy = greedy_baseline(run, samples, number)
    run.stop.check(run.grid)

    with run.phases("switch"):
        run.hand_device_to_actor()
    table = reward_table(run, samples, rollouts, greedy)
    with run.phases("estimate"):
        kl = reference_kl(run, rollouts, (len(samples), config.rollout.group_size))
        cut = truncated(rollouts, table)
        estimate = run.algorithm.estimate(table, truncated=cut, reference_kl=kl)
        batch = train_batch(rollouts, estimate)
    log = TokenLog() if run.report.records(number) else None
    every = config.logging.gradient_variance_every
    measure = bool(every) and number % every == 0
    learned = update(run, batch, estimate.clip_range, log, measure) if len(batch) else {"actor/updates": 0.0}

    with run.phases("checkpoint"):
        snapshot = capture(run, number, config.trainer.steps)
    with run.phases("sync"):
        run.hand_device_to_engine()
    with run.phases("sync_check"):
        spaced = rollouts[:: max(1, len(rollouts) // config.rollout.sync_check_rollouts)]
        mismatch = run.sync.check([r.tokens.tolist() for r in spaced[: config.rollout.sync_check_rollouts]])
    run.state.step = number

    seconds = run.phases.take()
    metrics = estimate.metrics | reward_metrics(table) | response_metrics(rollouts) | learned
    metrics |= save_metrics(run)
    metrics |= (
        {"sync/logprob_max_diff": mismatch} | throughput(rollouts, seconds) | seconds | run.phases.memory.metrics()
    )
    if (config.trainer.eval_every and number % config.trainer.eval_every == 0) or number == config.trainer.steps:
        metrics |= evaluate(run, number)
    metrics |= run.take_counters()
    run.report.log(number, metrics)
    run.report.samples(number, samples, rollouts, estimate.advantages)
    if log is not None:
        log_probs = run.grid.gather(log.rows)
        run.report.rollouts(number, [sample.id for sample in samples], table, cut, estimate, log_probs)
    if snapshot is not None:
        submit(run, snapshot, metrics)


def throughput(rollouts: Sequence[Rollout], seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of the whole world: generated while generating, and trained on per whole step."""
    generated = sum(len(rollout.response_ids) for rollout in rollouts)
    total = sum(rollout.num_tokens for rollout in rollouts)
    return {
        "perf/generated_tokens_per_s": generated / seconds["timing_s/generate"],
        "perf/tokens_per_s": total / seconds["timing_s/step"],
        "perf/total_tokens": float(total),
    }
