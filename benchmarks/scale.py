"""What the weights' way into the engines costs on 8 to 1,024 GPUs: the plan that a run makes, without a model and a GPU.

python -m benchmarks.scale [RECIPE --nodes N] [--json]
python -m benchmarks.scale --batches [...]: the exchange of rollouts instead, see benchmarks.scale_batches

With a recipe: its layout on N nodes of 8 GPUs, data parallelism making up the number. Without: some layouts of four GPUs, and
every recipe of recipes/scale on 1 to 128 nodes (`--nodes`: on so many only). Per weight sync:

- bytes_moved, bytes_floor: what a rank receives, and its slice of the engine's weights less what it holds of them as the
  actor's rank; both of the rank with the largest ratio, over_floor (among equals, of the one that receives most)
- bytes_sent: what the rank that sends most sends; bytes_sent_mean: the mean over ranks
- bytes_gathered: what gathering every tensor whole would bring to the rank that holds least
- messages: sent and received by the rank with the most of them; largest_buffer_bytes: the most that a rank sends, or
  receives, in one bucket; two buckets of each exist at once
- plan_seconds: of one core, for the plan of all ranks and one rank's part of it

Weights have the recipe's `model.dtype`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import scale_batches
from benchmarks.others import told
from megatron_rl.config import Config, ConfigError, load_recipe
from megatron_rl.config.actor import ParallelConfig
from megatron_rl.config.published import published_config
from megatron_rl.models import Model, model_of, read_hf_config
from megatron_rl.models.registry import created_config
from megatron_rl.planning.memory import total_parameters
from megatron_rl.weights.layouts import ActorLayout, EngineLayout, Piece, layers_of, numbered, unit_elements
from megatron_rl.weights.sync_plan import BUCKET_BYTES, Plan, make_plan

NODE = 8  # GPUs
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
RECIPES = Path(__file__).parents[1] / "recipes" / "scale"
# name -> (published model, actor's layout, engine's layout, ranks)
LAYOUTS: dict[str, tuple[str, ParallelConfig, EngineLayout, int]] = {
    "TP2 -> TP2": ("Qwen3-8B", ParallelConfig(tensor=2), EngineLayout(2), 2),
    "TP2 x PP2 -> TP4": ("Qwen3-8B", ParallelConfig(tensor=2, pipeline=2), EngineLayout(4), 4),
    "TP4 -> 2 x TP2": ("Qwen3-8B", ParallelConfig(tensor=4), EngineLayout(2), 4),
    "EP4 -> TP4": ("Qwen3-30B-A3B", ParallelConfig(expert=4), EngineLayout(4), 4),
    "EP4 -> EP2 x TP2": ("Qwen3-30B-A3B", ParallelConfig(expert=4), EngineLayout(2, expert=True), 4),
    "PP4 -> 4 x TP1": ("Qwen3-8B", ParallelConfig(pipeline=4), EngineLayout(1), 4),
}


@dataclass(frozen=True)
class Cost:
    """See the module; bytes are those of one weight sync."""

    ranks: int
    bytes_moved: int
    bytes_floor: int
    over_floor: float
    bytes_sent: int
    bytes_sent_mean: float
    bytes_gathered: int
    messages: int
    buckets: int
    largest_buffer_bytes: int
    plan_seconds: float


def elements(model: Model, index: int, pieces: Sequence[Piece]) -> int:
    return unit_elements(model.family.rules[index], model.dims) * sum(piece.size for piece in pieces)


def held_and_needed(
    model: Model, actor: ActorLayout, engine: EngineLayout
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Elements that each rank holds, needs, and needs and holds; int64 [world] each. From the layouts, not from the plan."""

    @cache
    def shared(index: int, cell: int, place: int) -> tuple[int, int, int]:
        rule = model.family.rules[index]
        own, wanted = actor.pieces(model, rule, cell), engine.pieces(model, rule, place)
        both = [part for want in wanted for piece in own if (part := want.within(piece)) is not None]
        return elements(model, index, own), elements(model, index, wanted), elements(model, index, both)

    @cache
    def layers(index: int, stage: int) -> int:
        """How often a stage has the rule's weight."""
        rule = model.family.rules[index]
        return sum(stage in actor.stages(model, rule, layer) for layer in layers_of(model, rule))

    found = np.zeros((actor.world, 3), np.int64)
    for rank in range(actor.world):
        stage, inner = divmod(rank, actor.stage_ranks)
        for index, rule in numbered(model):
            here = layers(index, stage)
            held, needed, both = shared(index, inner % actor.cells(rule), rank % engine.tensor)
            found[rank] += (here * held, len(layers_of(model, rule)) * needed, here * both)
    return found[:, 0], found[:, 1], found[:, 2]


def cost(model: Model, actor: ActorLayout, engine: EngineLayout, width: int) -> Cost:
    """`width`: bytes of a number."""
    begin = time.process_time()
    plan = make_plan(model, actor, engine, bucket_elements=BUCKET_BYTES // width, node=NODE)
    plan.of(actor.world - 1)
    seconds = time.process_time() - begin
    traffic = list(plan.traffic())
    sent, moved = np.sum([[bucket.sent, bucket.received] for bucket in traffic], axis=0)
    held, needed, both = held_and_needed(model, actor, engine)
    floor = needed - both
    ratio = np.where(moved == floor, 1.0, moved / np.maximum(floor, 1))
    worst = int(np.lexsort((moved, ratio))[-1])
    return Cost(
        ranks=actor.world,
        bytes_moved=int(moved[worst]) * width,
        bytes_floor=int(floor[worst]) * width,
        over_floor=float(ratio[worst]),
        bytes_sent=int(sent.max()) * width,
        bytes_sent_mean=float(sent.mean()) * width,
        bytes_gathered=int(total_parameters(model) - held.min()) * width,
        messages=int(messages(plan).max()),
        buckets=len(traffic),
        largest_buffer_bytes=int(max(bucket.largest for bucket in traffic)) * width,
        plan_seconds=seconds,
    )


def messages(plan: Plan) -> np.ndarray:
    """Sent and received by each rank; int64 [world]."""
    world = plan.actor.world
    found = np.zeros(world, np.int64)
    for shipments in plan.buckets:
        pairs = np.zeros((world, world), bool)
        for shipment in shipments:
            rows = shipment.moved > 0
            pairs[shipment.sources[rows], shipment.flow.target[rows]] = True
        found += pairs.sum(axis=0) + pairs.sum(axis=1)
    return found


def of_recipe(config: Config) -> Model:
    """The model, without its weights: from its folder, or by its name among those that the package knows."""
    if config.model.create is not None:
        return model_of(created_config(config.model.create))
    folder = Path(config.model.path or "")
    known = None if folder.exists() else published_config(folder.name)
    return model_of(known or read_hf_config(folder))


def recipe_cost(config: Config, nodes: int) -> Cost:
    """Raises ValueError where the layout does not fit so many nodes."""
    model = of_recipe(config)
    actor = ActorLayout.of(config.actor.parallel, model.dims["layers"], nodes * NODE)
    return cost(model, actor, EngineLayout.of(config.rollout), 4 if config.model.dtype == "float32" else 2)


def layout_cost(name: str) -> Cost:
    """Of one of `LAYOUTS`, in bf16."""
    published, parallel, engine, ranks = LAYOUTS[name]
    sizes = published_config(published)
    assert sizes is not None, f"{published} is known"
    model = model_of(sizes)
    return cost(model, ActorLayout.of(parallel, model.dims["layers"], ranks), engine, 2)


def all_costs(nodes: Sequence[int]) -> Iterator[tuple[str, Cost]]:
    for name, (published, *_) in LAYOUTS.items():
        yield f"{name}, {published}", layout_cost(name)
    for path in sorted(RECIPES.glob("[!_]*.yaml")):
        config = load_recipe(path)
        for count in nodes:
            try:
                yield path.stem, recipe_cost(config, count)
            except ValueError as error:
                print(f"{path.stem} on {count * NODE} GPUs: {error}", file=sys.stderr)


def table(costs: Sequence[tuple[str, Cost]]) -> Table:
    """Bytes in GB (10^9), buffers in MB (10^6)."""
    columns = (
        "layout",
        "ranks",
        "moved GB",
        "floor GB",
        "over floor",
        "most sent GB",
        "over mean",
        "gathered GB",
        "messages",
        "buckets",
        "buffer MB",
        "plan s",
    )
    shown = Table(*columns)
    for name, each in costs:
        shown.add_row(
            name,
            f"{each.ranks:,}",
            f"{each.bytes_moved / 1e9:.2f}",
            f"{each.bytes_floor / 1e9:.2f}",
            f"{each.over_floor:.3f}",
            f"{each.bytes_sent / 1e9:.2f}",
            f"{each.bytes_sent / each.bytes_sent_mean:.2f}" if each.bytes_sent else "",
            f"{each.bytes_gathered / 1e9:.1f}",
            f"{each.messages:,}",
            f"{each.buckets:,}",
            f"{each.largest_buffer_bytes / 1e6:.0f}",
            f"{each.plan_seconds:.2f}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--batches" in given:
        return scale_batches.main([each for each in given if each != "--batches"])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", nargs="?", type=Path, metavar="RECIPE", help="YAML file")
    parser.add_argument("--nodes", type=int, metavar="N", help=f"of {NODE} GPUs each")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON, bytes as they are")
    args = parser.parse_args(given)
    try:
        if args.nodes is not None and args.nodes < 1:
            raise ConfigError("--nodes must be greater than 0")
        if args.recipe is not None:
            costs = [(args.recipe.stem, recipe_cost(load_recipe(args.recipe), args.nodes or 1))]
        else:
            costs = list(all_costs([args.nodes] if args.nodes else NODES))
    except (ConfigError, ValueError, OSError) as error:
        print(f"benchmarks.scale: {error}", file=sys.stderr)
        return 2
    if args.json:
        found = [{"layout": name, **asdict(each)} for name, each in costs]
        print(json.dumps(found if args.recipe is None else found[0], indent=2))
    else:
        Console(width=170).print(table(costs))
    return 0


if __name__ == "__main__":
    with told():
        sys.exit(main())
