"""`plan --search`: the layouts of a recipe that fit on a number of nodes, the fastest first, and the best as a recipe."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from megatron_rl.commands import step_time
from megatron_rl.config import ConfigError, check, load_recipe
from megatron_rl.config.load import as_tree, changes
from megatron_rl.planning.components import GIB, PHASES, MemoryPlan
from megatron_rl.planning.search import Found, Space, pareto
from megatron_rl.planning.time.step import Predictor
from megatron_rl.runtime import disk, exit_codes

if TYPE_CHECKING:
    from megatron_rl.planning.exact import RankMemory

Exactly = Callable[[Found], list[tuple["RankMemory", MemoryPlan]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other layouts")
    group.add_argument(
        "--search",
        action="store_true",
        help="look for layouts that fit: the fastest, and the fastest that leave more memory; with --exact by its count",
    )
    group.add_argument(
        "--fp8", action="store_true", help="with --search: FP8 in actor and engine too, where the recipe has bf16"
    )
    group.add_argument(
        "--headroom-gib", type=float, default=3.0, metavar="GIB", help="with --search: free on every GPU (default 3)"
    )
    group.add_argument(
        "--write", type=Path, metavar="FILE", help="with --search: the fastest as a recipe, based on the given one"
    )


def run(args: argparse.Namespace, space: Space, predictor: Predictor, exactly: Exactly | None) -> int:
    """Returns 0 where a layout was found, 1 where none fits.

    Raises:
        ConfigError: options that do not go together, a file that exists, or a recipe that is refused in any layout.
    """
    if args.simulate or args.html is not None:
        raise ConfigError(
            "--search does not go with --simulate and --html: write the layout (--write FILE), then plan that"
        )
    if args.write is not None and args.write.exists():
        raise ConfigError(f"--write {args.write}: the file exists; name another one, or remove it")
    if args.headroom_gib < 0:
        raise ConfigError("--headroom-gib must not be below 0")
    space = replace(space, headroom=args.headroom_gib * GIB, fp8=args.fp8)
    layouts = space.search(predictor)
    if not layouts:
        space.check_alone()
    if exactly is not None:
        layouts = _counted(layouts, exactly, space)
    given = space.given(predictor)
    if args.json:
        print(json.dumps({"layouts": [figures(one) for one in layouts], "given": given and figures(given)}, indent=2))
    else:
        print(table(layouts, given, space, predictor))
    if layouts and args.write is not None:
        write(args, space, layouts[0])
    return exit_codes.OK if layouts else exit_codes.FAILED


def _counted(found: Sequence[Found], exactly: Exactly, space: Space) -> list[Found]:
    """Those that fit by the count of real modules, with its figures; each actor's is made once."""
    result: list[Found] = []
    counted: dict[str, list[RankMemory]] = {}
    for one in found:
        actor = repr(one.config.actor)
        if actor not in counted:
            counted[actor] = [memory for memory, _ in exactly(one)]
        from megatron_rl.planning.exact import on_rank  # after `exactly` has set what torch reads

        plans = [on_rank(one.plan, memory) for memory in counted[actor]]
        fullest = max(plans, key=lambda plan: max(map(plan.peak, PHASES)))
        if not any(problem for plan in plans for problem in plan.problems()) and space.fits(fullest):
            result.append(replace(one, plan=fullest))
    return pareto(result)


def figures(one: Found) -> dict[str, object]:
    """The layout's keys, its step and what stays free."""
    actor, rollout = as_tree(one.config)["actor"], as_tree(one.config)["rollout"]
    of_actor = ("parallel", "tokens_per_microbatch", "recompute", "recompute_modules", "recompute_layers", "offload")
    of_rollout = ("tensor_parallel", "expert_parallel", "memory_fraction", "fp8")
    return {
        "actor": {name: actor[name] for name in (*of_actor, "offload_weights", "fp8")},
        "rollout": {name: rollout[name] for name in of_rollout},
        "headroom_bytes": round(one.headroom),
        "step_time": step_time.figures(one.step),
    }


def describe(one: Found) -> tuple[str, ...]:
    """Cells of the table: actor, micro-batch, what is computed again, what is offloaded, engines."""
    actor, rollout = one.config.actor, one.config.rollout
    parallel = actor.parallel
    sizes = {
        "TP": parallel.tensor,
        "PP": parallel.pipeline,
        "VP": parallel.virtual_pipeline,
        "CP": parallel.context,
        "EP": parallel.expert,
        "ETP": parallel.expert_tensor,
    }
    again: str = actor.recompute
    if again == "selective":
        again = "+".join(actor.recompute_modules)
    elif again == "full" and actor.recompute_layers is not None:
        again = f"{actor.recompute_layers} layers"
    return (
        " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        + f" DP{one.plan.data_parallel}"
        + (" FP8" if actor.fp8 is not None else ""),
        f"{actor.tokens_per_microbatch}",
        again,
        "all" if actor.offload_weights else "state" if actor.offload else "",
        f"{one.plan.engines} x {rollout.tensor_parallel}{' EP' * rollout.expert_parallel}"
        f"{' FP8' if rollout.fp8 != 'none' else ''}, {rollout.memory_fraction:.2f}",
    )


def table(found: Sequence[Found], given: Found | None, space: Space, predictor: Predictor) -> str:
    lengths = predictor.lengths
    columns = f"{'actor':28s}{'tokens':>7s}  {'again':18s}{'offload':9s}engines, share"
    lines = [
        f"{space.world} GPUs ({predictor.hardware.name}); prompts of {lengths.prompt:,.0f} and responses of "
        f"{lengths.mean:,.0f} tokens in the mean; at least {space.headroom / GIB:g} GiB stay free; times are predictions",
        f"{'s/step':>8s}{'tok/s/GPU':>10s}{'free GiB':>9s}  {columns}",
    ]
    for one in (*found, *([given] if given is not None else [])):
        actor, tokens, again, offload, engine = describe(one)
        rates = f"{one.step.total:8.1f}{one.step.tokens_per_s_per_gpu['step']:10,.0f}{one.headroom / GIB:9.1f}"
        own = "  (the recipe's own)" if one is given else ""
        lines.append(f"{rates}  {actor:28s}{tokens:>7s}  {again:18s}{offload:9s}{engine}{own}")
    return "\n".join([*lines, *([] if found else ["NO LAYOUT FITS: more nodes, or shorter sequences"])])


def write(args: argparse.Namespace, space: Space, best: Found) -> None:
    """A recipe that differs from the given one in the layout and in what the command line overrode; it is checked.

    Raises:
        ConfigError: the recipe check refuses it.
    """
    before, fresh = load_recipe(args.recipe), load_recipe(args.recipe, args.overrides)
    after = replace(fresh, actor=best.config.actor, rollout=best.config.rollout, algorithm=best.config.algorithm)
    tree: dict[str, object] = {"base": os.path.relpath(args.recipe, args.write.parent)}
    for key, _, value in changes(as_tree(before), as_tree(after)):
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            inner = place.setdefault(section, {})
            assert isinstance(inner, dict)
            place = inner
        place[name] = value
    head = (
        f"# Found by `megatron-rl plan --search` for {space.world} GPUs: {best.step.total:.0f} s a step, predicted.\n"
    )
    args.write.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(args.write, head + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    written = load_recipe(args.write)
    written.launch.processes = None
    check(written, machine=space.machine, model=space.hf_config)
