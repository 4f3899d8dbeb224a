"""The sources of a task: each yields raw items, before templates and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_rl.base.messages import errors_named
from megatron_rl.base.typed_params import Params
from megatron_rl.config.schema import TaskConfig
from megatron_rl.seams import reasoning_gym
from megatron_rl.tasks import reset_step
from megatron_rl.tasks.bar_charts import bars_items, bars_params
from megatron_rl.tasks.python_maths import maths_params, python_maths_items
from megatron_rl.tasks.row_mapping import Item, file_items
from megatron_rl.tasks.rows import huggingface_rows, jsonl_rows, own_rows, parquet_rows
from megatron_rl.tasks.tool_house import house_params, tool_house_items
from megatron_rl.tasks.tool_world import tool_world_items, world_params

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


_GENERATED, _FILES = frozenset({"params", "seed"}), frozenset({"path", "columns"})
OWN = Source(file_items(own_rows, arrow=False), _GENERATED | {"columns"})  # a generator of the user's
SOURCES: dict[str, Source] = {
    "reasoning_gym": Source(reasoning_gym_items, _GENERATED | {"name"}),
    "tool_world": Source(tool_world_items, _GENERATED, world_params),
    "tool_house": Source(tool_house_items, _GENERATED, house_params),
    "gymnasium": Source(reset_step.prompts, _GENERATED, reset_step.environment_params),
    "python_maths": Source(python_maths_items, _GENERATED, maths_params),
    "bars": Source(bars_items, _GENERATED, bars_params),
    "jsonl": Source(file_items(jsonl_rows, arrow=False), _FILES),
    "parquet": Source(file_items(parquet_rows, arrow=True), _FILES),
    "huggingface": Source(file_items(huggingface_rows, arrow=True), _FILES | {"subset", "split", "revision"}),
}


def items_of(config: TaskConfig) -> Iterator[Item]:
    """The items of a task's source: one of `SOURCES`, or the user's own."""
    return (OWN if ":" in config.source else SOURCES[config.source]).items(config)
