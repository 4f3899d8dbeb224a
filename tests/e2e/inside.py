"""One rank of a run whose algorithm changes from step to step, and whose weight sync is then damaged on purpose.

Started once per rank with the run folder as its argument: starting engines is what takes the time. Writes `metrics.jsonl` as
any run does, a step per variant, and `faults.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# name -> the recipe's section `algorithm`
VARIANTS: dict[str, dict[str, Any]] = {
    "one update": {"preset": "cispo", "entropy_coef": 0.01, "kl": {"coef": 0.1, "estimator": "k2"}},
    "grpo": {"preset": "grpo"},
    "awpo": {"preset": "awpo"},
    "gdpo": {"preset": "gdpo"},
    "dgpo": {"preset": "dgpo"},
    "shrinkage": {"preset": "shrinkage"},
    "dapo": {"preset": "dapo", "resample_rounds": 2},
    "remax": {"preset": "remax"},
    "rloo": {"preset": "rloo"},
    "dr_grpo": {"preset": "dr_grpo"},
    "reinforce_pp": {"preset": "reinforce_pp"},
    "gspo": {"preset": "gspo"},
    "kl loss": {"preset": "grpo", "kl": {"coef": 0.1, "estimator": "k2"}},
    "kl reward": {"preset": "gdpo", "kl": {"reward_coef": 0.1}},
    "entropy": {"preset": "cispo", "entropy_coef": 0.01},
    "correction": {
        "preset": "grpo",
        "truncated": "mask",
        "correction": {
            "weight": "token",
            "cap": 1.00000029,  # between two numbers of float32, as 1.05 is: what is cut to it is smaller
            "filters": [
                {
                    "level": "token",
                    "by": "k1",
                    "low": -1.0,
                    "high": 1e-8,
                },  # less probable to the actor than to the engine
                {"level": "geometric", "by": "k3", "high": 1.0},
            ],
        },
    },
}
MINIBATCHES = {"one update": 1}  # else the recipe's
SENT, KEPT = "model.layers.1.mlp.down_proj.weight", "model.layers.1.input_layernorm.weight"
# Hugging Face name -> the engine's layer and the first of its rows: the last part of a fused layer, whose own weight vLLM
# empties, and a layer that keeps its weight.
PACKED = {
    "model.layers.1.self_attn.v_proj.weight": ("model.layers.1.self_attn.qkv_proj", -8),
    "lm_head.weight": ("lm_head", 0),
}


def main(run_dir: Path) -> None:
    import torch

    from megatron_rl.algorithms import make_algorithm
    from megatron_rl.config import load_recipe
    from megatron_rl.config.load import algorithm_config
    from megatron_rl.rewards import Scorer
    from megatron_rl.runtime import distributed
    from megatron_rl.trainer.loop import step
    from megatron_rl.trainer.run import build_run
    from megatron_rl.trainer.sft import warm_up

    config = load_recipe(run_dir / "recipe.yaml")
    config.actor.offload = config.actor.offload_weights = True  # as on a GPU
    torch.manual_seed(config.seed)
    grid = distributed.initialize(config.actor.parallel, 5, engine_ranks=config.rollout.tensor_parallel)
    run = build_run(config, grid, run_dir)
    run.report.start_over()
    warm_up(run)
    run.checkpoints.export()  # the reference policy, for those who recompute
    run.learner.actor.keep_reference()
    run.learner.actor.start_optimizer(config.actor.optimizer, 1000)
    run.start_engine()
    minibatches = config.trainer.minibatches
    for name, section in VARIANTS.items():
        config.trainer.minibatches = MINIBATCHES.get(name, minibatches)
        config.algorithm = algorithm_config(section)
        run.learner.algorithm = make_algorithm(config.algorithm, max_tokens=config.rollout.max_tokens)
        run.sampler.scorer = Scorer(config.rewards, run.learner.algorithm.estimator.needs.columns)
        if config.algorithm.resample_rounds:
            draw_ahead(run)
        step(run)
        weights = [parameter for chunk in run.learner.actor.chunks for parameter in chunk.parameters()]
        assert not any(weight.untyped_storage().nbytes() for weight in weights)
    run.learner.actor.onload_weights()
    faults = damage_sync(run)
    if run.grid.is_main:
        (run_dir / "faults.json").write_text(json.dumps(faults))
    run.close()
    distributed.shutdown()


def draw_ahead(run: Any) -> None:
    """Fails where groups that are drawn ahead are others than those drawn round by round."""
    drawn = []
    for ahead, before in ((False, 0), (True, 0), (True, 13)):
        run.config.algorithm.resample_ahead = ahead
        rollouts, after = run.sampler.sample(run.state.step + 1, replace(run.state, groups_drawn=before))
        rounds = run.sampler.take_counters()["rollouts/rounds"]
        facts = rollouts.facts[[name for name in rollouts.facts.dtype.names if name != "source"]]
        tokens = {
            row: [(one.ids.tolist(), one.logprobs is not None and one.logprobs.tobytes()) for one in rollout.segments]
            for row, rollout in rollouts.held.items()
        }
        names = [sample.id for sample in rollouts.samples]
        drawn.append((names, facts.tolist(), tokens, rollouts.rewards.tolist(), after, rounds))
    assert drawn[0] == drawn[1] == drawn[2]
    assert rounds > 1, "no group was replaced"


def damage_sync(run: Any) -> dict[str, str]:
    """What the sync says about each kind of damage, and `good` in between and at the end."""
    from megatron_rl.rollout.engine import EngineError, Request, drain
    from megatron_rl.rollout.sampling import Sampling
    from megatron_rl.rollout.sync import WholeSync, make_sync
    from megatron_rl.rollout.vllm_probe import VllmProbe
    from megatron_rl.weights.transfer import SyncError

    tokens = [sample.prompt_ids for sample in run.sampler.prompts.train[:4]]
    actor, engine = run.learner.actor, run.sampler.engine
    probe = VllmProbe(engine, run.grid)

    def verdict() -> str:
        scored = run.learner.score(tokens)
        run.learner.actor.offload_weights()  # a diagnosis brings them back
        try:
            return f"good: {run.sync.check(scored)}"
        except SyncError as error:
            return str(error)
        finally:
            run.learner.actor.onload_weights()

    def corrupted(weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            yield name, tensor * 1.5 if name == SENT else tensor

    def without(weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        return ((name, tensor) for name, tensor in weights if name != KEPT)

    whole, faults = actor.iter_hf_weights, {}
    sync = WholeSync(run.config, run.grid, actor, engine, probe)  # faults of slices are in tests/rollout
    for fault, send in (("sent", corrupted), ("not sent", without)):
        actor.iter_hf_weights = lambda send=send: send(whole())
        try:
            sync.push()
        except SyncError as error:
            faults[fault] = str(error)
    actor.iter_hf_weights = whole
    run.sync.push()
    faults["pushed again"] = verdict()
    for name, (layer, first) in PACKED.items():
        if run.grid.is_main:  # one rank of the engine only, which has the rows of the tokens that occur
            engine.llm.apply_model(lambda model, layer=layer, first=first: spoil(model.get_submodule(layer), first))
        faults[name] = verdict()
        run.sync.push()
    if run.grid.rank == 1:  # one rank of the engine only
        probe.parameters()[KEPT].data.mul_(1.5)
    faults["kept"] = verdict()
    probe.parameters()[KEPT].data.fill_(float("nan"))
    faults["not a number"] = verdict()
    run.sync.push()
    faults["pushed at last"] = verdict()
    take_step = engine.step
    wrong = iter([0.01])  # the first time only

    def otherwise() -> list[Any]:
        return [replace(ended, token_scores=ended.token_scores + next(wrong, 0.0)) for ended in take_step()]

    engine.step = otherwise
    faults["once"] = verdict()
    engine.step = take_step
    shapes, notes = engine.shard_shapes, []
    engine.shard_shapes = lambda: {**shapes(), KEPT: (1,)}
    assert isinstance(make_sync(run.config, run.grid, actor, engine, notes.append), WholeSync)
    [faults["another layout"]] = notes
    engine.shard_shapes = shapes
    run.config.rollout.sync = "whole"
    faults["whole"] = type(make_sync(run.config, run.grid, actor, engine, notes.append)).__name__
    engine.submit([Request(("", 0), tokens[0], Sampling(1.0, 1.0, max_tokens=4), seed=1)])
    engine.step()
    try:
        run.sync.push()
    except EngineError as error:
        faults["a request under way"] = str(error)
    list(drain(engine))
    return faults


def spoil(layer: Any, first: int) -> None:
    """Changes the rows from `first` on of the weight that the layer computes with, and not the weight that it holds."""
    product = layer.cpu_linear

    def spoilt(*arguments: Any) -> Any:
        out = product(*arguments)
        out[..., first:] *= 1.5
        return out

    layer.cpu_linear = spoilt


if __name__ == "__main__":
    main(Path(sys.argv[1]))
