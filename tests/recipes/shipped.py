"""Recipes of recipes/: their files, headers and trees, and each checked and planned at its real size."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config import Config, Machine, check, load_recipe
from megatron_rl.models import model_of
from megatron_rl.planning.components import GIB, MemoryPlan
from megatron_rl.planning.memory import make_plan

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CARDS = {"H100 (80 GB)": 79, "H200 (141 GB)": 139}  # GiB that the driver reports
ELSEWHERE = ("cpu", "eval")  # folders with tests of their own


def runnable() -> list[str]:
    """Recipes that can be started: not bases, whose file or folder begins with an underscore."""
    paths = (path.relative_to(RECIPES) for path in RECIPES.rglob("*.yaml"))
    return sorted(
        str(path) for path in paths if path.parts[0] not in ELSEWHERE and "_" not in {p[0] for p in path.parts}
    )


def header(name: str) -> dict[str, str]:
    """The comment at the top: `# Key: text`, continued by lines that are indented."""
    fields: dict[str, str] = {}
    key = ""
    for line in (RECIPES / name).read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        if match := re.match(r"# ([A-Z][a-z]+): (.*)", line):
            key = match[1]
            fields[key] = match[2]
        elif key:
            assert line.startswith("#   "), f"{name}: {line!r} belongs to no field of the header"
            fields[key] += " " + line[4:]
    return fields


def hardware(name: str) -> tuple[int, int]:
    """Nodes of 8 GPUs, and GiB of each GPU."""
    match = re.match(r"(\d+) nodes? x 8 (H\d+ \(\d+ GB\))", header(name)["Hardware"])
    assert match, f"{name}: the header's Hardware does not say how many nodes of which GPUs"
    return int(match[1]), CARDS[match[2]]


def nodes(name: str) -> int:
    return hardware(name)[0]


def tasks_of(name: str) -> Iterator[dict[str, Any]]:
    for tree in (*base_trees(name), own_tree(name)):
        for split in ("train", "eval"):
            yield from (task for task in tree.get("tasks", {}).get(split, {}).values() if task)


def own_tree(name: str) -> dict[str, Any]:
    tree = yaml.safe_load((RECIPES / name).read_text("utf-8"))
    tree.pop("base", None)
    return dict(tree)


def base_trees(name: str) -> list[dict[str, Any]]:
    """The trees of all bases, lowest first."""
    bases = yaml.safe_load((RECIPES / name).read_text("utf-8")).get("base", [])
    trees: list[dict[str, Any]] = []
    for base in [bases] if isinstance(bases, str) else bases:
        inner = str((RECIPES / name).parent.joinpath(base).resolve().relative_to(RECIPES))
        trees += [*base_trees(inner), own_tree(inner)]
    return trees


def leaves(tree: dict[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        inner = f"{key}.{name}" if key else name
        if isinstance(value, dict) and value:
            yield from leaves(value, inner)
        else:
            yield inner, value


@functools.cache
def loaded(name: str) -> Config:
    return load_recipe(RECIPES / name)


def checked(name: str, overrides: list[str] | None = None, world: int | None = None) -> Config:
    world = world or 8 * nodes(name)
    return check(
        load_recipe(RECIPES / name, overrides) if overrides else loaded(name),
        machine=Machine(gpus=8, world_size=world, local_world_size=min(8, world)),
    )


def plan(config: Config, world: int, gib: float = CARDS["H100 (80 GB)"]) -> MemoryPlan:
    assert config.model.path is not None
    model = json.loads((Path(config.model.path) / "config.json").read_text("utf-8"))
    return make_plan(config, model_of(model), world, gib * GIB)
