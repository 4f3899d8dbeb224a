"""`plan`: where a recipe's GPU memory goes on a number of nodes, and whether it fits; arithmetic only, no GPU needed."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.commands import layout_search, simulated, step_time
from megatron_rl.config import Config, ConfigError, Machine, check, load_recipe
from megatron_rl.config.checks import smallest_world
from megatron_rl.config.published import published_config
from megatron_rl.models import HFConfig, Model, model_of, read_hf_config
from megatron_rl.models.registry import created_config
from megatron_rl.planning.components import GIB, HOST_PHASES, PHASES, MemoryPlan
from megatron_rl.planning.memory import active_parameters, make_plan, total_parameters
from megatron_rl.runtime import disk, exit_codes

if TYPE_CHECKING:
    from megatron_rl.planning.exact import RankMemory


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides, e.g. actor.recompute=full")
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="default: the fewest, doubled until it fits, that the recipe's layout divides",
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N")
    parser.add_argument(
        "--gpu-memory-gib",
        type=float,
        metavar="GIB",
        help="memory of one GPU (default: that of --hardware; 79, an H100 with 80 GB)",
    )
    parser.add_argument(
        "--host-memory-gib",
        type=float,
        metavar="GIB",
        help="memory of one node, for what is offloaded and the checkpoint's copy (default: not checked)",
    )
    parser.add_argument(
        "--model-config",
        metavar="FILE",
        help="the model's config.json, where its folder (model.path) is not on this machine and its name is not that of a "
        "published model which the package knows",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="build a rank of each pipeline stage with Megatron-Core itself, on tensors without content, and count; seconds "
        "to a minute, needs torch",
    )
    parser.add_argument(
        "--json", action="store_true", help="the step's time as JSON; with --exact also each class of ranks"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also a page: memory and time by phase; with --simulate the steps, drawn",
    )
    step_time.add_arguments(parser)
    simulated.add_arguments(parser)
    layout_search.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 where it fits, 1 where it does not, 2 for a bad recipe."""
    try:
        hardware = step_time.hardware(args)
        gib = hardware.memory_gib if args.gpu_memory_gib is None else args.gpu_memory_gib
        if args.gpus_per_node < 1 or gib <= 0 or (args.nodes is not None and args.nodes < 1):
            raise ConfigError("--nodes, --gpus-per-node and --gpu-memory-gib must be greater than 0")
        config = load_recipe(args.recipe, args.overrides)
        if not config.rewards:
            raise ConfigError(
                "`plan` counts runs of `train`, and this recipe has no `rewards`. Runs of `sft` and `reward-model` hold what "
                "it says of the actor: to see that, add any reward, as in rewards.any.reward=length"
            )
        config.launch.processes = None  # the command line says how many there are
        given, source = _given(config, args.model_config)
        if args.nodes is None:
            args.nodes = _fewest_nodes(config, given, args.gpus_per_node, gib)
        machine = _machine(args.nodes, args.gpus_per_node)
        if args.search:
            model = _hf_config(config, given)
            predictor = step_time.predictor(args, config, model_of(model), _sizes, gib * GIB)
            exactly = (lambda one: _exactly(one.config, given, one.plan, args.gpus_per_node)) if args.exact else None
            return layout_search.run(
                args, layout_search.Space(config, model_of(model), model, machine, gib * GIB), predictor, exactly
            )
        config = check(config, command="train", machine=machine, model=given)
        host = None if args.host_memory_gib is None else args.host_memory_gib * GIB / args.gpus_per_node
        plan = make_plan(config, model_of(_hf_config(config, given)), args.nodes * args.gpus_per_node, gib * GIB, host)
        predictor = step_time.predictor(args, config, plan.model, _sizes, gib * GIB)
        step = predictor.of(config, plan)
        found: dict[str, object] = {"step_time": step_time.figures(step)}
        text = [step_time.table(step, predictor, config)]
        steps = None
        if args.simulate:
            steps = simulated.run(args, config, plan, predictor, step)
            found |= simulated.figures(steps)
            text.append(simulated.table(steps))
        if args.exact:
            measured = _exactly(config, given, plan, args.gpus_per_node)
            found |= figures(measured)
            text.insert(0, table(measured))
            held = [(f"ranks {own.rank} to {own.rank + own.ranks - 1}", rank) for own, rank in _fullest(measured)]
        else:
            text.insert(0, render(config, plan, source))
            held = [("the fullest GPU", plan)]
        problems = list(dict.fromkeys(problem for _, rank in held for problem in rank.problems()))
        if args.html is not None:
            from megatron_rl.commands import plan_page

            heading = f"{Path(args.recipe).stem} on {args.nodes} node{'s' * (args.nodes > 1)}"
            try:
                disk.replace(args.html, plan_page.render(heading, problems, held, step, steps))
            except OSError as error:
                print(f"megatron-rl: cannot write {args.html}: {error.strerror}; name another place", file=sys.stderr)
                return exit_codes.FAILED
        print(json.dumps(found, indent=2) if args.json else "\n\n".join(text))
        return exit_codes.FAILED if problems else exit_codes.OK
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _machine(nodes: int, gpus: int) -> Machine:
    return Machine(gpus=gpus, world_size=nodes * gpus, local_world_size=gpus)


def _fewest_nodes(config: Config, given: HFConfig | None, gpus: int, gib: float) -> int:
    """The fewest nodes of so many GPUs that the layout divides, doubled until it fits by arithmetic (below 1,024)."""
    nodes = fewest = max(1, math.lcm(smallest_world(config), gpus) // gpus)  # 0 of a size that `check` will refuse
    while nodes < 1024:
        with contextlib.suppress(
            ConfigError
        ):  # a batch may be too small for so many; the fewest are checked by the caller
            own = check(config, command="train", machine=_machine(nodes, gpus), model=given)
            if not any(make_plan(own, model_of(_hf_config(own, given)), nodes * gpus, gib * GIB).problems()):
                return nodes
        nodes *= 2
    return fewest


def _exactly(
    config: Config, given: HFConfig | None, plan: MemoryPlan, node: int
) -> list[tuple[RankMemory, MemoryPlan]]:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}  # read when torch is imported
    import warnings

    warnings.filterwarnings("ignore", module=r"(torch\.distributed|megatron\.core)\..*")
    from megatron_rl.seams import torch_compile

    torch_compile.leave_out()
    from megatron_rl.planning.exact import measure, on_rank

    return [(memory, on_rank(plan, memory)) for memory in measure(config, _hf_config(config, given), plan.world, node)]


def figures(measured: Sequence[tuple[RankMemory, MemoryPlan]]) -> dict[str, object]:
    """Each class of ranks, in bytes; of the last two phases they are the host's."""
    names = ("rank", "ranks", "stage", "parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return {
        "rank_classes": [
            {name: getattr(memory, name) for name in names}
            | {"phases": {phase: {"peak_bytes": round(plan.peak(phase))} for phase in (*PHASES, *HOST_PHASES)}}
            for memory, plan in measured
        ]
    }


def table(measured: Sequence[tuple[RankMemory, MemoryPlan]]) -> str:
    """A line per pipeline stage, of those of its ranks that hold most."""
    columns = ("weights", "gradients", "optimizer", "passes")
    widths = _widths()
    lines = [
        f"{'GiB':>14s}{'counted on modules without content':>44s}  at the most, by phase; the last two on the host",
        f"{'ranks':>14s}{'B parameters':>14s}"
        + "".join(f"{name:>10s}" for name in columns)
        + "".join(f"{phase:>{width}s}" for phase, width in widths.items()),
    ]
    for memory, plan in _fullest(measured):
        counted = (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes, memory.update_bytes)
        lines.append(
            f"{f'{memory.rank} to {memory.rank + memory.ranks - 1}':>14s}{memory.parameters / 1e9:14.3f}"
            + "".join(f"{value / GIB:10.1f}" for value in counted)
            + "".join(f"{plan.peak(phase) / GIB:{width}.1f}" for phase, width in widths.items())
        )
    lines.append(f"{'there is':>68s}" + _there_is(measured[0][1]))
    problems = list(dict.fromkeys(problem for _, plan in measured for problem in plan.problems()))
    lines += ["", "it fits" if not problems else "IT DOES NOT FIT", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)


def _fullest(measured: Sequence[tuple[RankMemory, MemoryPlan]]) -> list[tuple[RankMemory, MemoryPlan]]:
    """Of each pipeline stage the class that holds most, for all of the stage's ranks."""
    found = []
    for _, group in groupby(measured, key=lambda one: one[0].stage):
        classes = list(group)
        memory, plan = max(classes, key=lambda one: one[0].optimizer_bytes)
        ranks = sum(own.ranks for own, _ in classes)
        found.append((replace(memory, rank=classes[0][0].rank, ranks=ranks), plan))
    return found


def _widths() -> dict[str, int]:
    """Columns of the table's phases."""
    return {phase: max(len(phase) + 2, 8) for phase in (*PHASES, *HOST_PHASES)}


def _there_is(plan: MemoryPlan) -> str:
    """The line's cells: memory of a GPU, and of the host where it was given."""
    host = "" if plan.host_bytes is None else f"{plan.host_bytes / GIB:.1f}"
    cells = {phase: host if phase in HOST_PHASES else f"{plan.gpu_bytes / GIB:.1f}" for phase in _widths()}
    return "".join(f"{cells[phase]:>{width}s}" for phase, width in _widths().items()).rstrip()


def _given(config: Config, file: str | None) -> tuple[HFConfig | None, str]:
    """The config.json to plan with, where it is not in `model.path`; and a remark for the table.

    Raises:
        ConfigError: the file cannot be read, or nothing is known of a model whose folder is not there.
    """
    if file is not None:
        return _read(Path(file)), ""
    if config.model.path is None or (folder := Path(config.model.path).expanduser()).exists():
        return None, ""
    known = published_config(folder.name)
    if known is None:
        raise ConfigError(
            f"`model.path`: {folder} does not exist, and the package knows no published model called {folder.name}; give "
            "its config.json: --model-config FILE"
        )
    return known, f"; sizes of the published {folder.name}, since {folder} does not exist"


def _read(path: Path) -> HFConfig:
    try:
        model = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model-config {path} cannot be read: {error}") from None
    if not isinstance(model, dict):
        raise ConfigError(f"--model-config {path} does not hold a JSON object")
    return model


def _sizes(config: Config) -> Model:
    """The model of a recipe without `--model-config`."""
    return model_of(_hf_config(config, _given(config, None)[0]))


def _hf_config(config: Config, given: HFConfig | None) -> HFConfig:
    if given is not None:
        return given
    if config.model.path is not None:
        return read_hf_config(config.model.path)
    assert config.model.create is not None  # `check` requires one of the two
    return created_config(config.model.create)


def render(config: Config, plan: MemoryPlan, source: str = "") -> str:
    """The table, then what it means, then what does not fit. `source`: a remark on the model."""
    parallel, model, widths = config.actor.parallel, plan.model, _widths()
    total, active = total_parameters(model), active_parameters(model)
    lines = [
        f"model: {total / 1e9:.2f} B parameters"
        + (f", {active / 1e9:.2f} B of them active per token" if active != total else "")
        + source,
        f"actor: tensor {parallel.tensor} x pipeline {parallel.pipeline} x "
        + (f"context {parallel.context} x " if parallel.context > 1 else "")
        + f"data {plan.data_parallel}"
        + (f", expert {parallel.expert}" if model.experts else "")
        + (f" x {parallel.expert_tensor}" if parallel.expert_tensor > 1 else "")
        + f" on {plan.world} GPUs; {plan.parameters.total / 1e9:.3f} B parameters on the fullest",
        f"engines: {plan.engines} of {config.rollout.tensor_parallel} GPUs; the cache of each holds "
        f"{plan.cache_tokens:,.0f} tokens, {plan.full_length_sequences:.0f} sequences of full length ({plan.longest})",
        "",
        f"{'GiB on the fullest GPU (last two: host)':42s}"
        + "".join(f"{phase:>{width}s}" for phase, width in widths.items()),
    ]
    for part in plan.components:
        cells = "".join(
            f"{part.bytes / GIB:{width}.1f}" if phase in part.phases else " " * width for phase, width in widths.items()
        )
        lines.append(f"{part.part.value + (' *' if part.estimate else ''):42s}{cells}".rstrip())
    lines.append(f"{'sum':42s}" + "".join(f"{plan.peak(phase) / GIB:{width}.1f}" for phase, width in widths.items()))
    lines.append(f"{'there is':42s}" + _there_is(plan))
    lines.append("* estimates, not measured on a GPU; weights, gradients, optimizer state and cache are counted")
    if plan.model.description.vision is not None:
        lines.append("not in it: what the vision tower's passes keep, and their time")
    problems = list(plan.problems())
    lines += ["", "it fits" if not problems else "IT DOES NOT FIT", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)
