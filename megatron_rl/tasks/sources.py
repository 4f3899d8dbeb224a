"""The sources of a task: each yields raw items, before templates and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_rl.config.schema import TaskConfig
from megatron_rl.seams import reasoning_gym
from megatron_rl.tasks.bar_charts import bars_items
from megatron_rl.tasks.files import huggingface_rows, jsonl_rows, own_rows, parquet_rows
from megatron_rl.tasks.row_mapping import Item, file_items
from megatron_rl.tasks.tool_world import tool_world_items

SPLIT = "split"  # the source that draws prompts from a train task


def reasoning_gym_items(config: TaskConfig) -> Iterator[Item]:
    """Items of a reasoning-gym dataset, in its own order; a pure function of name, params, seed and size.

    `metadata` is the dataset's, plus `question` (the text before the prompt template) and `source_params` (the dataset's
    parameters), so that the `puzzle` reward can call the dataset's verifier.
    """
    gym = reasoning_gym.load()
    assert config.name is not None
    assert config.size is not None
    try:
        dataset = gym.create_dataset(config.name, seed=config.seed, size=config.size, **config.params)
    except (AssertionError, TypeError, ValueError) as error:  # how the datasets refuse a parameter
        raise ValueError(f"reasoning_gym's {config.name} refuses params {dict(config.params)}: {error}") from error
    own = {"source_dataset": config.name, "source_params": dict(config.params)}
    for index in range(config.size):
        item = dataset[index]
        metadata = {**item["metadata"], **own, "question": item["question"]}
        yield Item(prompt=item["question"], answer=item["answer"], metadata=metadata)


SOURCES: dict[str, Callable[[TaskConfig], Iterator[Item]]] = {
    "reasoning_gym": reasoning_gym_items,
    "tool_world": tool_world_items,
    "bars": bars_items,
    "jsonl": file_items(jsonl_rows, arrow=False),
    "parquet": file_items(parquet_rows, arrow=True),
    "huggingface": file_items(huggingface_rows, arrow=True),
}


def items_of(config: TaskConfig) -> Iterator[Item]:
    """The items of a task's source: one of `SOURCES`, or the user's own."""
    source = file_items(own_rows, arrow=False) if ":" in config.source else SOURCES[config.source]
    return source(config)
