"""Facts in a checkpoint on LoRA's adapters and the model they belong to, and whether a run's are the same."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from megatron_rl.actor.actor import Actor
from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.convert.source import weights_checksum
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.models.lora import targets_of

_AS_RECIPE = {"rank": "actor.lora.rank", "scale": "actor.lora.alpha / rank", "modules": "actor.lora.targets"}


class AdapterFacts(TypedDict):
    rank: int
    scale: float
    modules: list[str]
    experts: bool
    base: str  # the model's folder
    base_weights: str  # checksum of its files' sizes and both ends


def facts(actor: Actor, base: Path) -> AdapterFacts | None:
    """Facts on the actor's adapters and the model in `base`, rank 0's on every rank; None where every parameter is
    trained."""
    lora = actor.config.lora
    if lora is None:
        return None
    weights = weights_checksum(base) if actor.grid.is_main else ""
    return {
        "rank": lora.rank,
        "scale": lora.scale,
        "modules": targets_of(lora, actor.model),
        "experts": lora.experts,
        "base": str(base),
        "base_weights": actor.grid.broadcast(weights),
    }


def check(folder: Path, facts_here: AdapterFacts | None) -> None:
    """Raises CheckpointError where a checkpoint's adapters are not those of this run, or belong to another model."""
    saved: AdapterFacts | None = manifest.read(folder).get("adapters")
    if saved is None and facts_here is None:
        return
    if saved is None or facts_here is None:
        one, other = (
            ("adapters only", "every parameter") if facts_here is None else ("every parameter", "adapters only")
        )
        raise CheckpointError(
            f"{folder} is of a run that trained {one}, and this recipe trains {other} (actor.lora is "
            f"{'null' if facts_here is None else 'set'}); set it back, or give this run another run_dir, or --resume never"
        )
    changed = [
        f"{_AS_RECIPE.get(name, f'actor.lora.{name}')} is {saved.get(name)!r} there and {value!r} here"
        for name, value in facts_here.items()
        if not name.startswith("base") and saved.get(name) != value
    ]
    if changed:
        raise CheckpointError(f"{folder} has other adapters: {'; '.join(changed)}; set it back, or --resume never")
    if saved["base_weights"] != facts_here["base_weights"]:
        raise CheckpointError(
            f"{folder} has adapters of another model: they were trained beside {saved['base']}, whose weights are not those "
            f"of {facts_here['base']}; set model.path to the model that they belong to"
        )
