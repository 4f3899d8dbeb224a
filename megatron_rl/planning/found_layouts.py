"""A search's result: counted on real modules, and the best layout as a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from megatron_rl.base.messages import errors_named
from megatron_rl.config import ConfigError, check, load_recipe
from megatron_rl.config.load import as_tree, changes
from megatron_rl.planning.components import PHASES
from megatron_rl.planning.search import Found, Space, pareto
from megatron_rl.runtime import disk

if TYPE_CHECKING:
    from megatron_rl.planning.exact import RankMemory

Measure = Callable[[Found], Sequence["RankMemory"]]


def counted(found: Sequence[Found], measure: Measure, space: Space) -> list[Found]:
    """Returns those that fit by the count of real modules, with its figures; each actor's is made once."""
    result: list[Found] = []
    classes: dict[str, Sequence[RankMemory]] = {}
    for layout in found:
        actor = repr(layout.config.actor)
        if actor not in classes:
            classes[actor] = measure(layout)
        from megatron_rl.planning.exact import on_rank  # after `measure` has set what torch reads

        plans = [on_rank(layout.plan, memory) for memory in classes[actor]]
        fullest = max(plans, key=lambda plan: max(map(plan.peak, PHASES)))
        if not any(problem for plan in plans for problem in plan.problems()) and space.fits(fullest):
            result.append(replace(layout, plan=fullest))
    return pareto(result)


def write(file: Path, recipe: str, overrides: Sequence[str], space: Space, best: Found) -> None:
    """A recipe that differs from the given one in the layout and in what the command line overrode; it is checked.

    Raises:
        ConfigError: it cannot be written, or the recipe check refuses it.
    """
    before, fresh = load_recipe(recipe), load_recipe(recipe, overrides)
    launch = replace(fresh.launch, generators=best.config.launch.generators)
    found = best.config
    after = replace(fresh, actor=found.actor, rollout=found.rollout, algorithm=found.algorithm, launch=launch)
    tree: dict[str, object] = {"base": os.path.relpath(recipe, file.parent)}
    for key, _, value in changes(as_tree(before), as_tree(after)):
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            inner = place.setdefault(section, {})
            assert isinstance(inner, dict)
            place = inner
        place[name] = value
    head = f"# Found by `megatron-rl plan --search` for {space.gpus} GPUs: {best.step.total:.0f} s a step, predicted.\n"
    with errors_named(f"--write {file}", OSError, as_error=ConfigError):
        file.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(file, head + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    written = load_recipe(file)
    written.launch.processes = None
    check(written, machine=space.machine, model=space.hf_config)
