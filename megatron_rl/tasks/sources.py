"""The sources of a task: each yields raw items, before templates and tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_rl.base.messages import errors_named
from megatron_rl.base.typed_params import Params, check_params
from megatron_rl.config.schema import TaskConfig
from megatron_rl.seams import reasoning_gym
from megatron_rl.tasks import bar_charts, python_maths, reset_step, tool_house, tool_world
from megatron_rl.tasks.row_mapping import Item, file_items
from megatron_rl.tasks.rows import huggingface_rows, jsonl_rows, own_rows, parquet_rows

SPLIT = "split"  # the source that draws prompts from a train task


def reasoning_gym_items(config: TaskConfig) -> Iterator[Item]:
    """Items of a reasoning-gym dataset, in its own order; a pure function of name, params, seed and size.

    `metadata` is the dataset's, plus `question` (the text before the prompt template) and `source_params` (the dataset's
    parameters), so that the `puzzle` reward can call the dataset's verifier.
    """
    gym = reasoning_gym.load()
    assert config.name is not None
    assert config.size is not None
    # How the datasets refuse a parameter.
    with errors_named(
        f"reasoning_gym's {config.name} refuses params {dict(config.params)}", AssertionError, TypeError, ValueError
    ):
        dataset = gym.create_dataset(config.name, seed=config.seed, size=config.size, **config.params)
    own = {"source_dataset": config.name, "source_params": dict(config.params)}
    for index in range(config.size):
        item = dataset[index]
        metadata = {**item["metadata"], **own, "question": item["question"]}
        yield Item(prompt=item["question"], answer=item["answer"], metadata=metadata)


@dataclass(frozen=True)
class Source:
    """Where the prompts of a task come from.

    Attributes:
        items: the prompts, before templates and tokens.
        keys: of the task that only some sources read, and this one does.
        check_params: raises ValueError where the generator's own parameters are wrong; None: others know (reasoning-gym).
    """

    items: Callable[[TaskConfig], Iterator[Item]]
    keys: frozenset[str]
    check_params: Callable[[Params], object] | None = None

    @property
    def generates(self) -> bool:
        """Whether items are made, as many as asked for, and not read from files."""
        return "params" in self.keys


def generator[P](name: str, kind: type[P], make_item: Callable[[P, random.Random], Item]) -> Source:
    """A source whose item i is a function of params, seed and i. `kind`: the dataclass of its parameters."""

    def check(params: Params) -> P:
        check_params(kind, params, name)
        return kind(**params)

    def items(config: TaskConfig) -> Iterator[Item]:
        params = check(config.params)
        assert config.size is not None
        for index in range(config.size):
            yield make_item(params, random.Random(f"{name}, seed {config.seed}, item {index}"))

    return Source(items, _GENERATED, check)


_GENERATED, _FILES = frozenset({"params", "seed"}), frozenset({"path", "columns"})
OWN = Source(file_items(own_rows, arrow=False), _GENERATED | {"columns"})  # a generator of the user's
SOURCES: dict[str, Source] = {
    "reasoning_gym": Source(reasoning_gym_items, _GENERATED | {"name"}),
    "tool_world": generator("tool_world", tool_world.WorldParams, tool_world.make_item),
    "tool_house": generator("tool_house", tool_house.HouseParams, tool_house.make_item),
    "gymnasium": Source(reset_step.prompts, _GENERATED, reset_step.environment_params),
    "python_maths": generator("python_maths", python_maths.MathsParams, python_maths.make_item),
    "bars": generator("bars", bar_charts.BarsParams, bar_charts.make_item),
    "jsonl": Source(file_items(jsonl_rows, arrow=False), _FILES),
    "parquet": Source(file_items(parquet_rows, arrow=True), _FILES),
    "huggingface": Source(file_items(huggingface_rows, arrow=True), _FILES | {"subset", "split", "revision"}),
}


def items_of(config: TaskConfig) -> Iterator[Item]:
    """The items of a task's source: one of `SOURCES`, or the user's own."""
    return (OWN if ":" in config.source else SOURCES[config.source]).items(config)
