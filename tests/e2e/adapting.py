"""One rank of a run whose engine adds the actor's adapters itself. Writes `verdicts.json`: what syncs and checks say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WRONG = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


def main(run_dir: Path) -> None:
    import torch

    from megatron_rl.config import load_recipe
    from megatron_rl.runtime import distributed
    from megatron_rl.trainer.run import build_run
    from megatron_rl.weights.transfer import SyncError

    config = load_recipe(run_dir / "recipe.yaml")
    grid = distributed.initialize(config.actor.parallel, 5, engine_ranks=config.rollout.tensor_parallel)
    run = build_run(config, grid, run_dir)
    run.start_engine()
    actor, engine = run.learner.actor, run.sampler.engine
    tokens = [sample.prompt_ids for sample in run.sampler.prompts.train[:8]]

    def scores() -> list[list[float]]:
        return [row.tolist() for row in engine.score(tokens)]

    def verdict() -> str:
        try:
            run.sync.push()
            run.sync.check(run.learner.score(tokens))
        except (SyncError, RuntimeError) as error:
            return str(error)
        return "good"

    drawn = [scores()]  # of the model alone, since every B is 0
    verdicts: dict[str, Any] = {}
    for number in (1, 2):
        torch.manual_seed(number)
        for chunk in actor.chunks:
            for parameter in (p for p in chunk.parameters() if p.requires_grad):
                parameter.data.normal_(std=0.05)
        verdicts[f"sync {number}"] = verdict()
        drawn.append(scores())
    gathered = actor.iter_adapters

    def sending(change: Callable[[str, Any], tuple[str, Any]]) -> Callable[[], Iterator[tuple[str, Any]]]:
        return lambda: (change(*each) for each in gathered())

    for fault, change in (
        ("another value", lambda name, tensor: (name, tensor * 1.5 if name == WRONG else tensor)),
        ("another name", lambda name, tensor: (name.replace("layers.1.", "layers.7."), tensor)),
    ):
        actor.iter_adapters = sending(change)  # type: ignore[method-assign]
        verdicts[fault] = verdict()
    actor.iter_adapters = gathered  # type: ignore[method-assign]
    verdicts["at last"] = verdict()
    drawn.append(scores())
    verdicts["scores"] = drawn
    if run.grid.is_main:
        (run_dir / "verdicts.json").write_text(json.dumps(verdicts))
    run.close()
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
