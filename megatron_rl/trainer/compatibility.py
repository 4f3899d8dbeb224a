"""Whether a run may continue from a checkpoint: its model, tokenizer, method and stage have to be the run's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.base.messages import errors_named
from megatron_rl.base.plugins import read_yaml
from megatron_rl.checkpoint import manifest, store
from megatron_rl.checkpoint.store import CheckpointError, SavedState
from megatron_rl.config import as_tree, changes
from megatron_rl.config.schema import Config
from megatron_rl.data.like_lengths import LENGTHS
from megatron_rl.data.pause import can_wait
from megatron_rl.models.hf_config import JSON, HFConfig
from megatron_rl.rollout.ahead import AHEAD
from megatron_rl.rollout.partial import WAITING
from megatron_rl.trainer.state import State
from megatron_rl.weights.files import companions

# Fields that transformers and conversions add to the architecture's.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
# Files of a model folder that give token numbers their meaning; others, like chat templates, shape prompts only.
_VOCABULARY = re.compile(
    r"tokenizer\.(json|model)|vocab\.\w+|merges\.txt|added_tokens\.json|.*\.(tiktoken|spm|bpe)|spiece\.model"
)


def model_facts(hf_config: HFConfig) -> dict[str, JSON]:
    """The Hugging Face configuration without what is not the model."""
    return {name: value for name, value in sorted(hf_config.items()) if name not in _NOT_THE_MODEL}


def check_command(saved: SavedState, command: str, folder: Path) -> None:
    if saved["command"] != command:
        raise CheckpointError(
            f"{folder} was written by `megatron-rl {saved['command']}`; give this run another run_dir, or --resume never"
        )


def check_model(hf_config: HFConfig, folder: Path) -> None:
    saved, current = manifest.read(folder)["model"], model_facts(hf_config)
    # Older checkpoints have no objects and lists in it.
    names = saved.keys() | {name for name, value in current.items() if not isinstance(value, dict | list)}
    changed = [
        f"{name} is {saved.get(name)!r} there and {current.get(name)!r} here"
        for name in sorted(names)
        if saved.get(name) != current.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"{folder} is of another model: {store.summarize(changed)}; give this run another run_dir, or --resume never"
        )


def check_frozen(frozen: bool, folder: Path) -> None:
    saved = (saved_recipe(folder).get("actor") or {}).get("freeze_vision_tower", False)
    if saved != frozen:
        raise CheckpointError(
            f"{folder} is of a run with actor.freeze_vision_tower = {saved}, whose optimizer has other state; set it back, "
            f"or to start a new run from its weights, give it another run_dir and model.path={folder}"
        )


def check_tokenizer(model: Path, folder: Path) -> None:
    """Token numbers must mean what they meant: the model folder's vocabulary is the one that is kept in the checkpoint."""
    here, there = companions(model), companions(folder)
    changed = sorted(
        name
        for name in here.keys() & there.keys()
        if _VOCABULARY.fullmatch(name) and here[name].read_bytes() != there[name].read_bytes()
    )
    if changed:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer: {', '.join(changed)} in {model} is not what it was; restore "
            "it (or model.create.characters and .words), or give this run another run_dir, or --resume never"
        )


def check_estimator(saved: SavedState, estimator: str, folder: Path) -> None:
    if saved["algorithm"]["estimator"] != estimator:
        raise CheckpointError(
            f"{folder} is of a run with the estimator {saved['algorithm']['estimator']!r}, the recipe's is {estimator!r}; to "
            f"start a new run from its weights, give it another run_dir and model.path={folder}"
        )


def check_stage(state: State, steps: int, folder: Path) -> None:
    """`steps`: of the recipe's warm-up."""
    if state.warming_up and (state.warm_up > steps or steps == 0):
        raise CheckpointError(
            f"{folder} is of step {state.warm_up} of the warm-up, and the recipe's has sft.steps = {steps}; set it back, or "
            "start over with --resume never"
        )


def check_drawn(config: Config, folder: Path) -> None:
    """Raises CheckpointError where it has rollouts that were not trained on yet, and the recipe has no use for them."""
    if config.rollout.partial is None and (folder / WAITING).exists():
        raise CheckpointError(
            f"{folder}: responses wait in it, whose prompts would be lost; set rollout.partial as in its recipe.yaml, or "
            "start over with --resume never"
        )
    if config.launch.generators is None and (folder / AHEAD).exists():
        raise CheckpointError(
            f"{folder}: the next step's responses are in it, drawn by earlier weights; set launch.generators as in its "
            "recipe.yaml, or start over with --resume never"
        )
    takes_others = config.rollout.partial or config.launch.generators or config.algorithm.resample_rounds
    if takes_others and (folder / LENGTHS).exists():
        raise CheckpointError(
            f"{folder}: prompts that come next wait in it (trainer.like_lengths), and would be lost; leave rollout.partial, "
            "launch.generators and algorithm.resample_rounds as in its recipe.yaml, or start over with --resume never"
        )


def check_waiting(config: Config, state: State, folder: Path) -> None:
    """Raises CheckpointError where the recipe cannot train on rollouts in it that wait: they would be older than it allows,
    or are in other groups."""
    partial, trainer, is_ahead = config.rollout.partial, config.trainer, (folder / AHEAD).exists()
    if not is_ahead and not (folder / WAITING).exists():
        return
    saved = saved_recipe(folder)["trainer"]
    if trainer.minibatches * trainer.epochs < saved["minibatches"] * saved["epochs"]:
        raise CheckpointError(
            f"{folder}: responses wait in it, whose age counts in optimizer steps, and a step of this recipe has fewer of "
            "these; leave trainer.minibatches and trainer.epochs as in its recipe.yaml, or start over with --resume never"
        )
    if partial is None or not (folder / WAITING).exists():
        return
    with np.load(folder / WAITING, allow_pickle=False) as file:
        opened, group_size = file["opened"].tolist(), int(file["count"])
    if group_size != config.rollout.group_size:
        raise CheckpointError(
            f"{folder}: prompts wait in it with {group_size} responses each, and rollout.group_size is "
            f"{config.rollout.group_size}; set it back, or start over with --resume never"
        )
    if not can_wait(opened, state.step + is_ahead, trainer.prompts_per_step, partial.max_staleness):
        raise CheckpointError(
            f"{folder}: {len(opened)} prompts wait in it, which this recipe does not train on within "
            f"rollout.partial.max_staleness = {partial.max_staleness} weight syncs; raise that, or trainer.prompts_per_step, "
            "to what they are in its recipe.yaml, or start over with --resume never"
        )


def changed_keys(config: Config, folder: Path) -> list[str]:
    """Keys of the recipe that are not as the checkpoint's recipe has them, each with both values."""
    changed = changes(saved_recipe(folder), as_tree(config))
    return [f"{key} {before!r} -> {after!r}" for key, before, after in changed if key != "run_dir"]


def saved_recipe(folder: Path) -> dict[str, Any]:
    """CheckpointError where it cannot be read."""
    with errors_named(f"{folder}: its recipe cannot be read", OSError, ValueError, as_error=CheckpointError):
        recipe = read_yaml(folder / "recipe.yaml")
    if not isinstance(recipe, dict):
        raise CheckpointError(f"{folder}: its recipe.yaml holds no recipe")
    return recipe
