"""`plan`: where a recipe's GPU memory goes on a number of nodes, whether it fits, and how long a step takes."""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.base.messages import errors_named
from megatron_rl.commands.numbers import number, numbers
from megatron_rl.config import Config, ConfigError, check, load_recipe
from megatron_rl.models import HFConfig, model_of
from megatron_rl.planning import found_layouts, tables
from megatron_rl.planning.components import GIB
from megatron_rl.planning.inputs import SPREAD, Cluster, Responses, hf_config_of, known_config, predictor_of
from megatron_rl.planning.search import Space, pareto
from megatron_rl.planning.simulation.forecast import Forecast, Simulation, forecast
from megatron_rl.planning.time.hardware import TABLES, parse
from megatron_rl.planning.time.step import Predictor
from megatron_rl.runtime import disk, exit_codes

if TYPE_CHECKING:
    from megatron_rl.planning.exact import RankMemory

_RESTART_MINUTES, _JUDGED_AT_ONCE = 10.0, 256.0
_SIMULATED_STEPS, _HEADROOM_GIB = 20, 3.0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be above 0")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", default=[], help="overrides, e.g. actor.recompute=full"
    )
    add = parser.add_argument
    add(
        "--nodes",
        type=_count,
        metavar="N",
        help="default: the fewest, doubled until it fits, that the recipe's layout divides",
    )
    add("--gpus-per-node", type=_count, default=8, metavar="N")
    add(
        "--hardware",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(TABLES)}, or a YAML file with values and their `base`; values may follow: "
        "h100,memory_gib=140,network=25e9 (default h100; docs/layouts-evidence.md has the tables)",
    )
    add(
        "--host-memory-gib",
        type=number(0),
        metavar="GIB",
        help="memory of one node, for what is offloaded and the checkpoint's copy (default: not checked)",
    )
    add(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="the model's config.json, where its folder (model.path) is not on this machine and its name is not that of a "
        "published model which the package knows",
    )
    add(
        "--exact",
        action="store_true",
        help="build a rank of each pipeline stage with Megatron-Core itself, on tensors without content, and count; seconds "
        "to a minute, needs torch",
    )
    add("--json", action="store_true", help="the step's time as JSON; with --exact also each class of ranks")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="also a page: memory and time by phase; with --simulate the steps, drawn",
    )
    _add_times(parser.add_argument_group("the step's time"))
    _add_simulation(parser.add_argument_group("a simulation of steps, response by response"))
    _add_search(parser.add_argument_group("other layouts"))


def _add_times(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--response-lengths",
        type=Path,
        metavar="RUN",
        help="a run folder, or one of its rollouts/step_<n>.npz: lengths as recorded there, in place of the next",
    )
    add(
        "--response-tokens",
        type=numbers(0, most=2),
        metavar="MEAN[,SIGMA]",
        help="SIGMA: standard deviation of the logarithm of a response's length (default: half of rollout.max_tokens, "
        f"{SPREAD:g})",
    )
    add("--prompt-tokens", type=number(0), metavar="MEAN", help="default: a quarter of rollout.max_prompt_tokens")
    add(
        "--reward-seconds",
        type=number(0, above=False),
        metavar="S",
        help="scoring after the last response (default: that of --calibrate, or 0)",
    )
    add(
        "--signal-share",
        type=number(0),
        metavar="P",
        help="with algorithm.resample_rounds: of the groups that have a signal (default 1: none is replaced)",
    )
    add(
        "--drafted-share",
        type=number(0, above=False),
        metavar="P",
        help="with rollout.speculation: of the tokens drawn while few enough sequences are left for drafts, those that were "
        "guessed; a run logs rollouts/drafted_share_below (default: that of --calibrate, or 0)",
    )
    add(
        "--calibrate",
        type=Path,
        metavar="RUN",
        help="a run's folder: phases are scaled so that its own times come out, and its lengths are taken",
    )


def _add_simulation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--simulate", action="store_true", help="synchronous steps, and what other ways would give")
    add("--simulated-steps", type=_count, metavar="N", help=f"default {_SIMULATED_STEPS}")
    add("--drawn-before", action="store_true", help="later epochs: earlier responses say which prompts to begin first")
    add(
        "--judge-seconds",
        type=numbers(0, above=False, most=2),
        metavar="MEAN[,N]",
        help=f"a judge's answer, asked as responses end, and how many are under way (default {_JUDGED_AT_ONCE:g})",
    )
    add(
        "--mtbf-hours",
        type=numbers(0, most=2),
        metavar="H[,MINUTES]",
        help=f"mean time between two failures of one node, and until the job runs again (default {_RESTART_MINUTES:g})",
    )


def _add_search(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--search",
        action="store_true",
        help="look for layouts that fit: the fastest, and the fastest that leave more memory; with --exact by its count",
    )
    add("--fp8", action="store_true", help="with --search: FP8 in actor and engine too, where the recipe has bf16")
    add(
        "--headroom-gib",
        type=number(0, above=False),
        metavar="GIB",
        help=f"with --search: free on every GPU (default {_HEADROOM_GIB:g})",
    )
    add("--write", type=Path, metavar="FILE", help="with --search: the fastest as a recipe, based on the given one")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where it fits, 1 where it does not (with --search: where nothing does), 2 for a bad recipe."""
    _check_options(args)
    with errors_named("", as_error=ConfigError):
        config = load_recipe(args.recipe, args.overrides)
        if not config.rewards:
            raise ConfigError(
                "`plan` counts runs of `train`, and this recipe has no `rewards`. Runs of `sft` and `reward-model` hold what "
                "it says of the actor: to see that, add any reward, as in rewards.any.reward=length"
            )
        config.launch.processes = None  # the command line says how many there are
        config.model.path = config.model.path and os.path.expanduser(config.model.path)
        host = None if args.host_memory_gib is None else args.host_memory_gib * GIB / args.gpus_per_node
        cluster = Cluster(parse(args.hardware), args.gpus_per_node, host)
        known, remark = known_config(config, args.model_config)
        nodes = cluster.fewest_nodes(config, known) if args.nodes is None else args.nodes
        return (_search if args.search else _plan)(args, config, cluster, nodes, known, remark)


def _check_options(args: argparse.Namespace) -> None:
    """Refuses what would have no effect."""
    for needed, is_used, options in (
        (
            "--simulate",
            args.simulate,
            ("simulated_steps", "drawn_before", "judge_seconds", "mtbf_hours"),
        ),
        ("--search", args.search, ("fp8", "headroom_gib", "write")),
        ("no --response-lengths", args.response_lengths is None, ("response_tokens",)),
    ):
        for option in options:
            value = getattr(args, option)
            if not is_used and value is not None and value is not False:
                raise ConfigError(f"--{option.replace('_', '-')} has no effect here: it needs {needed}")


def _responses(args: argparse.Namespace) -> Responses:
    mean, spread = (*(args.response_tokens or (None,)), SPREAD)[:2]
    return Responses(args.response_lengths, mean, spread, args.prompt_tokens)


def _signal_share(args: argparse.Namespace, config: Config) -> float:
    if args.signal_share is None:
        return 1.0
    if args.signal_share > 1:
        raise ConfigError(f"--signal-share: a share is at most 1, not {args.signal_share:g}")
    if not config.algorithm.resample_rounds:
        raise ConfigError("--signal-share has no effect here: it needs algorithm.resample_rounds")
    return float(args.signal_share)


def _predictor(args: argparse.Namespace, config: Config, cluster: Cluster, known: HFConfig | None) -> Predictor:
    model, share = model_of(hf_config_of(config, known)), args.drafted_share
    if share is not None:
        if (speculation := config.rollout.speculation) is None:
            raise ConfigError("--drafted-share has no effect here: it needs rollout.speculation")
        if not share <= (most := speculation.tokens / (1 + speculation.tokens)):
            raise ConfigError(
                f"--drafted-share: drafts of {speculation.tokens} tokens guess at most {most:.3g} of all, not {share:g}"
            )
    signal = _signal_share(args, config)
    return predictor_of(config, model, cluster, _responses(args), args.reward_seconds, args.calibrate, share, signal)


def _plan(
    args: argparse.Namespace, config: Config, cluster: Cluster, nodes: int, known: HFConfig | None, remark: str
) -> int:
    config = check(config, command="train", machine=cluster.machine(nodes), model=known)
    predictor = _predictor(args, config, cluster, known)
    plan = cluster.plan(config, predictor.model, nodes)
    step = predictor.of(config, plan)
    figures: dict[str, object] = {"step_time": tables.step_figures(step)}
    text, simulated = [tables.step_table(step, predictor, config)], None
    if args.simulate:
        simulated = _simulated(args, config, cluster, nodes, known, predictor)
        figures |= tables.simulation_figures(simulated)
        text.append(tables.simulation_table(simulated, config))
    if args.exact:
        from megatron_rl.planning.exact import on_rank

        measured = [(memory, on_rank(plan, memory)) for memory in _measure(config, known, plan.actor_world, cluster)]
        figures |= tables.exact_figures(measured)
        text.insert(0, tables.exact_table(measured))
        memory = [(f"ranks {r.rank} to {r.rank + r.ranks - 1}", own) for r, own in tables.fullest_ranks(measured)]
    else:
        text.insert(0, tables.memory_table(config, plan, remark))
        memory = [("the fullest GPU", plan)]
    problems = list(dict.fromkeys(problem for _, held in memory for problem in held.problems()))
    if args.html is not None:
        from megatron_rl.planning import plan_page

        heading = f"{Path(args.recipe).stem} on {nodes} node{'s' * (nodes > 1)}"
        try:
            disk.replace(args.html, plan_page.render(heading, problems, memory, step, simulated))
        except OSError as error:
            print(f"megatron-rl: cannot write {args.html}: {error.strerror}; name another place", file=sys.stderr)
            return exit_codes.FAILED
    print(json.dumps(figures, indent=2) if args.json else "\n\n".join(text))
    return exit_codes.FAILED if problems else exit_codes.OK


def _simulated(
    args: argparse.Namespace,
    config: Config,
    cluster: Cluster,
    nodes: int,
    known: HFConfig | None,
    predictor: Predictor,
) -> Forecast:
    """Simulates every mode; with split placement the others as if the recipe had none."""
    generators = config.launch.generators
    if generators is not None:
        config = copy.deepcopy(config)
        config.launch.generators = None
        with errors_named("--simulate also shows the recipe with launch.generators=null", as_error=ConfigError):
            config = check(config, command="train", machine=cluster.machine(nodes), model=known)
    plan = cluster.plan(config, predictor.model, nodes)
    share = None if generators is None else generators / plan.world
    what, step = _simulation(args, config, nodes), predictor.of(config, plan)
    return forecast(what, config, plan, predictor, step, share)


def _simulation(args: argparse.Namespace, config: Config, nodes: int) -> Simulation:
    judge = failures = None
    if args.judge_seconds and args.judge_seconds[0]:
        mean, at_once = (*args.judge_seconds, _JUDGED_AT_ONCE)[:2]
        if at_once < 1:
            raise ConfigError(f"--judge-seconds: {at_once:g} answers under way are too few; at least 1 is")
        judge = mean, round(at_once)
    if args.mtbf_hours:
        hours, minutes = (*args.mtbf_hours, _RESTART_MINUTES)[:2]
        failures = hours * 3600 / nodes, minutes * 60
    steps = args.simulated_steps or _SIMULATED_STEPS
    return Simulation(steps, _responses(args), args.drawn_before, judge, failures, _signal_share(args, config))


def _measure(config: Config, known: HFConfig | None, world: int, cluster: Cluster) -> Sequence[RankMemory]:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}  # read when torch is imported
    warnings.filterwarnings("ignore", module=r"(torch\.distributed|megatron\.core)\..*")
    from megatron_rl.seams import torch_compile

    torch_compile.leave_out()
    from megatron_rl.planning.exact import measure

    return measure(config, hf_config_of(config, known), world, cluster.gpus_per_node)


def _search(
    args: argparse.Namespace, config: Config, cluster: Cluster, nodes: int, known: HFConfig | None, remark: str
) -> int:
    """Raises:
    ConfigError: options that do not go together, a file that exists, or a recipe that is refused in any layout.
    """
    if args.simulate or args.html is not None:
        raise ConfigError(
            "--search does not go with --simulate and --html: write the layout (--write FILE), then plan that"
        )
    if args.write is not None and args.write.exists():
        raise ConfigError(f"--write {args.write}: the file exists; name another one, or remove it")
    predictor, hf_config = _predictor(args, config, cluster, known), hf_config_of(config, known)
    machine = cluster.machine(nodes)
    headroom = (_HEADROOM_GIB if args.headroom_gib is None else args.headroom_gib) * GIB
    space = Space(config, predictor.model, hf_config, machine, cluster.gpu_bytes, headroom, args.fp8)
    layouts = pareto(layout for split in space.splits() for layout in split.search(predictor))
    if not layouts:
        space.check_alone()
    if args.exact:
        layouts = found_layouts.counted(
            layouts, lambda one: _measure(one.config, known, one.plan.actor_world, cluster), space
        )
    given = space.given(predictor)
    if args.json:
        figures = [tables.layout_figures(one) for one in layouts]
        print(json.dumps({"layouts": figures, "given": given and tables.layout_figures(given)}, indent=2))
    else:
        print(tables.layout_table(layouts, given, space, predictor))
    if layouts and args.write is not None:
        found_layouts.write(args.write, args.recipe, args.overrides, space, layouts[0])
    return exit_codes.OK if layouts else exit_codes.FAILED
