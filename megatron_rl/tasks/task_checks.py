"""Checks of a recipe's tasks without torch, without a tokenizer, and without generating anything."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import islice

from megatron_rl.base.messages import errors_named, unknown_name
from megatron_rl.base.typed_params import Params
from megatron_rl.config.schema import ColumnsConfig, TaskConfig, TasksConfig
from megatron_rl.tasks.demonstrations import COLUMN, make_writer
from megatron_rl.tasks.image_placeholders import check_images
from megatron_rl.tasks.loading import fill_prompt, task_weights
from megatron_rl.tasks.order import window_counts
from megatron_rl.tasks.puzzle_checks import check_dataset_params, dataset_files, dataset_params, has_field
from megatron_rl.tasks.row_mapping import Item, column_names, folder_of, has_column, to_item
from megatron_rl.tasks.rows import Row, files_of, jsonl_rows, own_rows, parquet_rows
from megatron_rl.tasks.sources import OWN, SOURCES, SPLIT, items_of
from megatron_rl.tasks.templates import check_template
from megatron_rl.tasks.tokenizing import template_params

_ROWS = 8  # first rows of a file whose columns are looked at
_MOST_ITEMS = 1_000_000_000  # prompts of a task
# Keys of a task that every source reads; `Source.keys` has the others.
_ALWAYS = {
    "source",
    "prompt",
    "chat",
    "chat_params",
    "chat_template",
    "tools",
    "agent",
    "exclude",
    "weight",
    "size",
    "demonstrations",
    "demonstration_params",
}
# How BFCL is called: its package with its simulators, its data set on the hub, its files.
_BFCL = re.compile(r"bfcl_eval\b|berkeley-function-call|\bBFCL_v\d", re.IGNORECASE)
_OF_SPLIT = {"source", "of", "hold_out", "seed"}


def check_tasks(tasks: TasksConfig) -> None:
    """Checks every task's keys, names, parameters and first rows; takes milliseconds.

    Where reasoning-gym is not installed, its datasets' names and parameters stay unchecked until the task is loaded.

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    for group, configs in (("train", tasks.train), ("eval", tasks.eval)):
        for name, config in configs.items():
            key = f"tasks.{group}.{name}"
            try:
                if group == "train":
                    _refuse_benchmark(config)
                if config.source == SPLIT:
                    _check_split(config, group, tasks)
                else:
                    _check_task(config)
            except ValueError as error:
                raise ValueError(f"{key}.{error}") from error
            for other in config.exclude:
                if group == "eval":
                    raise ValueError(f"{key}.exclude: only train tasks can leave out prompts of eval tasks")
                if other not in tasks.eval:
                    raise ValueError(f"{key}.exclude: {unknown_name('eval task', other, tasks.eval)}")
                if tasks.eval[other].source == SPLIT:
                    raise ValueError(
                        f"{key}.exclude: {other} is a split, whose prompts leave {tasks.eval[other].of} anyway"
                    )
            if group == "eval" and config.weight is not None:
                raise ValueError(f"{key}.weight: only train tasks are mixed; remove it")
    shared = tasks.train.keys() & tasks.eval.keys()
    if shared:
        raise ValueError(f"tasks.train and tasks.eval both have a task {sorted(shared)[0]!r}: rename one of them")
    if weights := task_weights(tasks.train):
        window_counts(weights)


def _refuse_benchmark(config: TaskConfig) -> None:
    """ValueError where a train task's prompts or environment are BFCL's."""
    named = {"source": config.source, "path": config.path}
    if config.agent is not None:
        params = {f"agent.params.{key}": value for key, value in config.agent.params.items()}
        named |= {"agent.name": config.agent.name, **{k: v for k, v in params.items() if isinstance(v, str)}}
    for key, value in named.items():
        if value is not None and _BFCL.search(value):
            raise ValueError(
                f"{key} ({value}) is BFCL's, by which models are judged: one that has trained on its questions or with its "
                "simulators has no score there. Train on other tasks (tool_house, your own), and run BFCL by "
                "`megatron-rl evaluate --harness bfcl`"
            )


def _check_task(config: TaskConfig) -> None:
    """Messages start with the key below the task, so that the caller can put the rest of the path before them."""
    if config.source not in SOURCES and ":" not in config.source:
        said = unknown_name("source", config.source, [*SOURCES, SPLIT])
        raise ValueError(f"source: {said} (a generator of your own is written file.py:function)")
    _check_keys(config)
    if config.chat_params and not config.chat:
        raise ValueError("chat_params: has no effect without chat: true")
    if config.chat_template is not None:
        if not config.chat:
            raise ValueError("chat_template: has no effect without chat: true")
        template_params(config)
    if config.tools and not config.chat:
        raise ValueError("tools: has no effect without chat: true")
    for number, tool in enumerate(config.tools):
        if not isinstance(function := tool.get("function"), dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{number}]: must be {{type: function, function: {{name: ..., parameters: ...}}}}")
    source = SOURCES.get(config.source, OWN)
    if config.size is None and source.generates:
        raise ValueError("size: is missing; say how many items to generate")
    with errors_named("prompt"):
        in_template = check_template(config.prompt)
    if config.source == "reasoning_gym":
        _check_reasoning_gym(config, in_template)
    elif source.check_params is not None:
        _check_generated(config, source.check_params)
    else:
        _check_data(config, in_template)
    if config.demonstrations is None:
        if config.demonstration_params:
            raise ValueError("demonstration_params: has no effect without demonstrations; remove it")
        return
    with errors_named("demonstrations"):
        make_writer(config.demonstrations, config.demonstration_params)


def _check_reasoning_gym(config: TaskConfig, in_template: list[str]) -> None:
    if config.name is None:
        raise ValueError("name: is missing; name one of reasoning-gym's datasets, for example chain_sum")
    files = dataset_files()
    if files is None:
        return
    if config.name not in files:
        raise ValueError(f"name: {unknown_name('reasoning-gym dataset', config.name, files)}")
    known = dataset_params(files[config.name])
    for key in config.params:
        if key in ("seed", "size"):
            raise ValueError(f"params.{key}: belongs one level up, next to name")
        if known is not None and key not in known:
            raise ValueError(f"params: {unknown_name(f'parameter of {config.name}', key, known - {'seed', 'size'})}")
    assert config.size is not None  # `_check_task` has checked it
    with errors_named(f"params: {config.name}"):
        check_dataset_params(files[config.name], config.params, config.seed, config.size)
    for field in in_template:
        if not has_field(files[config.name], field):
            raise ValueError(f"prompt: no item of {config.name} has a field {field!r}; {{prompt}} is the question")


def _check_keys(config: TaskConfig) -> None:
    """Keys that the source does not read have their defaults."""
    defaults = TaskConfig(source=config.source)
    read = _OF_SPLIT if config.source == SPLIT else _ALWAYS | SOURCES.get(config.source, OWN).keys
    for name in (field.name for field in fields(TaskConfig)):
        if name not in read and getattr(config, name) != getattr(defaults, name):
            raise ValueError(f"{name}: has no effect with source: {config.source}; remove it")


def _check_split(config: TaskConfig, group: str, tasks: TasksConfig) -> None:
    if group == "train":
        raise ValueError("source: split is for eval tasks: it takes prompts out of a train task")
    _check_keys(config)
    if config.of is None:
        raise ValueError("of: is missing; name the train task whose prompts are held out")
    if config.of not in tasks.train:
        raise ValueError(f"of: {unknown_name('train task', config.of, tasks.train)}")
    if config.hold_out is None:
        raise ValueError("hold_out: is missing; say how many prompts are held out, or which share of them")
    if not (
        0 < config.hold_out < 1 or (1 <= config.hold_out <= _MOST_ITEMS and config.hold_out == int(config.hold_out))
    ):
        raise ValueError(f"hold_out = {config.hold_out}, must be a whole number of prompts, or a share between 0 and 1")


def _check_generated(config: TaskConfig, check_params: Callable[[Params], object]) -> None:
    with errors_named("params"):
        check_params(config.params)
    if config.source != "bars":  # whose item has an image to draw
        _fill(next(items_of(config)), config)


def _fill(item: Item, config: TaskConfig) -> None:
    with errors_named("prompt"):
        prompt = fill_prompt(item, config)
    if not isinstance(prompt, str) and not config.chat:
        raise ValueError("chat: the prompts are chat messages: set chat: true to apply the tokenizer's chat template")


def _check_data(config: TaskConfig, in_template: list[str]) -> None:
    """Rows: the columns of the first ones, where reading them needs no network and no missing library."""
    is_plugin = ":" in config.source
    if not is_plugin and config.path is None:
        what = "the dataset's name, or its folder" if config.source == "huggingface" else f"the {config.source} file"
        raise ValueError(f"path: is missing; give {what}")
    with errors_named(f"{'source' if is_plugin else 'path'}"):
        rows = _first_rows(config)
    if rows is None:
        return
    if not rows:
        raise ValueError(f"source: {config.source} yields nothing" if is_plugin else f"path: {config.path} is empty")
    columns = config.columns
    defaults = ColumnsConfig()
    needed = {"columns.prompt": columns.prompt}
    needed |= {  # the default may be absent: not every task has a gold answer
        f"columns.{key}": getattr(columns, key)
        for key in ("answer", "tool_calls", "needs_response", "tools", "system")
        if getattr(columns, key) != getattr(defaults, key)
    }
    needed |= {f"columns.metadata.{name}": path for name, path in columns.metadata.items()}
    if config.demonstrations is not None and config.demonstrations.startswith(COLUMN):
        needed["demonstrations"] = config.demonstrations.removeprefix(COLUMN)
    for where, row in rows:
        metadata = row.get("metadata")
        known = {*row, *(metadata if isinstance(metadata, dict) else ()), *columns.metadata}
        for key, path in needed.items():
            if not has_column(row, path) and not (key == "demonstrations" and path in known):
                raise ValueError(f"{key}: {where}: {_no_column(path, (*column_names(row), *known))}")
        for path in in_template:
            if path != "prompt" and path not in known:
                raise ValueError(f"prompt: {where}: {_no_column(path, known)}")
    with errors_named("columns"):
        items = first_items(config)
    for _, item in items:
        _fill(item, config)


def first_items(config: TaskConfig) -> list[tuple[str, Item]]:
    """The first rows as items, each with its place; [] for sources without rows, and where `_first_rows` has none.

    Raises:
        ValueError: a row that makes no item; names it.
    """
    rows = _first_rows(config) if config.source in ("jsonl", "parquet") or ":" in config.source else None
    items = []
    for where, row in rows or ():
        with errors_named(where):
            item = to_item(row, config.columns, config.source == "parquet", folder_of(config))
            check_images(item.prompt, item.images)
            items.append((where, item))
    return items


def _no_column(path: str, known: Iterable[str]) -> str:
    """The nearest name may be the wrong column, so all names are listed."""
    names = list(dict.fromkeys(known))
    listed = f" (it has {', '.join(names)})"
    said = unknown_name("column", path, names)
    return said + (listed if "did you mean" in said else "")


def _first_rows(config: TaskConfig) -> list[tuple[str, Row]] | None:
    """The first rows; None where they need a network, or a library that is not installed."""
    if ":" in config.source:
        return list(islice(own_rows(config), _ROWS))
    assert config.path is not None
    if config.source == "jsonl":
        return list(islice(jsonl_rows(config), _ROWS))
    if config.source == "parquet":
        files_of(config.path, ".parquet")
        return list(islice(parquet_rows(config), _ROWS)) if importlib.util.find_spec("pyarrow") else None
    return None
