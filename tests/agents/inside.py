"""One rank of a run whose prompts are conversed about: what its engine draws, what the actor says of it, and a step.

Started once per rank with the run folder as its argument. Writes `drawn_<engine>.json`, on each engine's first rank, beside
what any run writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # ranks are scripts


def main(run_dir: Path) -> None:
    import numpy as np
    import torch

    from megatron_rl.config import load_recipe
    from megatron_rl.rollout.engine import Request, drain
    from megatron_rl.rollout.sampling import Sampling
    from megatron_rl.runtime import distributed
    from megatron_rl.trainer.evaluate import evaluate
    from megatron_rl.trainer.loop import step
    from megatron_rl.trainer.run import build_run
    from tests.agents import talking

    config = load_recipe(run_dir / "recipe.yaml")
    torch.manual_seed(config.seed)
    grid = distributed.initialize(config.actor.parallel, 5, engine_ranks=config.rollout.tensor_parallel)

    def by_row(rollouts: Any) -> dict[int, Any]:
        """Of all engines: who draws what depends on time."""
        parts = grid.all_gather({row: talking.one(rollout) for row, rollout in rollouts.held.items()})
        return {row: bits for part in parts for row, bits in part.items()}

    run = build_run(config, grid, run_dir)
    run.report.start_over()
    run.learner.start()
    run.start_engine()
    rollouts, _ = run.sampler.sample(1, run.state)
    found = run.sampler.take_counters()["conversation/prefix_hit_share"]
    share = {row: rollouts.held[row] for row in rollouts.held if grid.engine.is_leader}
    everything = {
        (row, number): tokens
        for part in grid.all_gather({r: sequences_of(o, o.tokens) for r, o in share.items()})
        for row, sequences in part.items()
        for number, tokens in enumerate(sequences)
    }
    scores = dict(
        zip(
            sorted(everything),
            run.learner.score([everything[key] for key in sorted(everything)]).log_probs,
            strict=True,
        )
    )
    if grid.engine.is_leader:
        record = [of(row, rollout, scores, rollouts) for row, rollout in sorted(share.items())]
        (run_dir / f"drawn_{grid.engine.index}.json").write_text(json.dumps(record))
    for talking.HURRY in (11, 12, 13):  # other latencies, and all prompts in the cache: the same bits
        again, _ = run.sampler.sample(1, run.state)
        assert by_row(again) == by_row(rollouts)
    warm = run.sampler.take_counters()["conversation/prefix_hit_share"]
    step(run)
    # What was said before the step, drawn on from after it.
    greedy = Sampling(0.0, 1.0, max_tokens=1)
    engine = run.sampler.engine
    held = {row: sequences_of(rollout, rollout.tokens)[0] for row, rollout in sorted(rollouts.held.items())}
    engine.submit([Request(("", row), tokens, greedy) for row, tokens in held.items()])
    drawn = {c.request.name[1]: (c.ids[0], c.logprobs[0]) for c in drain(engine)}
    drawn = {row: one for part in grid.all_gather(drawn) for row, one in part.items()}
    rows = sorted(drawn)
    after = run.learner.score([[*everything[row, 0], drawn[row][0]] for row in rows]).log_probs
    if grid.rank == 0:
        record = {
            "found": found,
            "warm": warm,
            "moved": max(np.abs(after[i][:-1] - scores[row, 0]).max() for i, row in enumerate(rows)),
            "stale": max(abs(after[i][-1] - drawn[row][1]) for i, row in enumerate(rows)),
        }
        (run_dir / "prefixes.json").write_text(json.dumps({key: float(value) for key, value in record.items()}))
    run.report.log(2, evaluate(run.sampler, run.report, 2, run.config.trainer.steps))
    misled = misrouted(run)
    if grid.rank == 0:
        (run_dir / "misrouted.json").write_text(json.dumps(misled))
    credit = by_turn(run, rollouts)
    if grid.rank == 0:
        (run_dir / "credit.json").write_text(json.dumps(credit))
    run.close()
    distributed.shutdown()


def misrouted(run: Any) -> dict[str, Any]:
    """What the check after a sync finds, and what it says where an engine's second layer chooses experts otherwise and
    log-probs may differ as they like."""
    from megatron_rl.rollout.engine import read
    from megatron_rl.weights.transfer import SyncError

    scored = run.score_by_actor()
    found: dict[str, Any] = {"healthy": run.sync.check(scored).experts}
    gates = []

    def mislead(model: Any) -> None:
        gate = model.model.layers[1].mlp.gate
        gates.append(gate.register_forward_hook(lambda module, taken, output: (output[0].flip(-1), output[1])))

    if run.grid.engine.index == run.grid.engine.count - 1:
        run.sampler.engine.llm.apply_model(mislead)
    before, run.sync.tolerance = run.sync.tolerance, 1e9
    answers = read(run.sampler.engine, scored.sequences)
    # A second way, token by token, without what a sequence's last ones go to.
    shares = [
        len(set(of_engine[1].tolist()) - set(of_actor[1].tolist())) / len(of_actor[1])
        for answer, own in zip(answers, scored.experts, strict=True)
        for of_engine, of_actor in zip(answer.experts[: len(own) - 1], own[:-1], strict=True)
    ]
    found["share"] = max(run.grid.all_gather(float(np.mean(shares))))
    try:
        run.sync.check(scored)
    except SyncError as error:
        found["said"] = str(error)
    run.sync.tolerance = before
    for gate in gates:
        gate.remove()
    return found


def by_turn(run: Any, rollouts: Any) -> dict[str, Any]:
    """An update of the weights that drew, with credit by turn, on conversations but those of gyms: each token's advantage, by
    prompt and rollout, as the ranks that trained on it had it, and what the update was."""
    from megatron_rl.algorithms import make_algorithm
    from megatron_rl.trainer.turn_credit import turns_of

    run.learner.actor.load_hf(run.sampler.folder)
    chosen = [i for i, sample in enumerate(rollouts.samples) if sample.task not in ("verifiers", "nemo_gym")]
    rollouts = rollouts.of_prompts(chosen)
    rollouts.facts["version"] = run.learner.actor.optimizer_steps
    rollouts.turns = turns_of(run.grid, rollouts)
    run.config.algorithm.gamma = 0.5
    run.learner.algorithm = make_algorithm({"preset": "rloo", "credit": "turn", "gamma": 0.5})
    estimate = run.learner.compute_advantages(run.sampler.reward_table(rollouts), rollouts)
    batch = run.learner.train_batch(rollouts, estimate)
    rows = np.flatnonzero(estimate.train.flatten().numpy()).tolist()
    names = [f"{rollouts.sample(row).id} {row % rollouts.count}" for row in rows]
    parts = run.grid.all_gather({names[i]: values.tolist() for i, values in batch.advantages.items()})
    learned = run.learner.update(batch, None)
    kept = {name: learned[name] for name in ("actor/grad_norm", "token_advantage/abs_mean", "loss/objective")}
    return {"advantages": {name: values for part in parts for name, values in part.items()}, **kept}


def sequences_of(rollout: Any, values: Any) -> list[list[Any]]:
    """Numbers of all tokens, by sequence."""
    ends = np.cumsum(rollout.sequence_lengths)[:-1]
    return [part.tolist() for part in np.split(values, ends)]


def of(row: int, rollout: Any, scores: Any, rollouts: Any) -> dict[str, Any]:
    mask = rollout.loss_mask
    masks = enumerate(sequences_of(rollout, mask))
    return {
        "row": row,
        "converses": rollouts.sample(row).agent is not None,
        "id": rollout.sample_id,
        "index": rollout.index,
        "tokens": rollout.tokens.tolist(),
        "mask": mask.tolist(),
        "logprobs": rollout.logprobs.tolist(),
        "by_actor": np.concatenate([scores[row, number][np.array(part[1:])] for number, part in masks]).tolist(),
        "sequences": rollout.sequence_lengths,
        "experts": rollout.experts.tolist(),
        "messages": rollout.messages,
        "failed_by": rollout.failed_by,
        "rewards": rollouts.rewards_of(row),
        "turns": sum(segment.logprobs is not None for segment in rollout.segments),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
