"""What can be said about a recipe's tasks without torch, without a tokenizer, and without generating anything."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from itertools import islice
from pathlib import Path

from megatron_rl.config.schema import TaskConfig, TasksConfig
from megatron_rl.names import unknown_name
from megatron_rl.tasks.demonstrations import COLUMN, make_writer
from megatron_rl.tasks.sources import SOURCES, read_jsonl
from megatron_rl.tasks.templates import check_template

_ROWS = 8  # first rows of a file whose columns are looked at
_KEYS_OF = {"reasoning_gym": {"name", "params", "seed"}, "jsonl": {"path", "prompt_key", "answer_key"}}


def check_tasks(tasks: TasksConfig) -> None:
    """Check every task's keys, names, parameters and first rows; takes milliseconds.

    The names and parameters of reasoning-gym's datasets are read from its source files, since importing it takes
    seconds; where it is not installed, they stay unchecked until the task is loaded.

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    for group, configs in (("train", tasks.train), ("eval", tasks.eval)):
        for name, config in configs.items():
            key = f"tasks.{group}.{name}"
            if "/" in name:
                raise ValueError(f"{key}: a task's name must not contain '/'")
            try:
                _check_task(config)
            except ValueError as error:
                raise ValueError(f"{key}.{error}") from error
            for other in config.exclude:
                if group == "eval":
                    raise ValueError(f"{key}.exclude: only train tasks can leave out prompts of eval tasks")
                if other not in tasks.eval:
                    raise ValueError(f"{key}.exclude: {unknown_name('eval task', other, tasks.eval)}")
    shared = tasks.train.keys() & tasks.eval.keys()
    if shared:
        raise ValueError(f"tasks.train and tasks.eval both have a task {sorted(shared)[0]!r}: rename one of them")


def _check_task(config: TaskConfig) -> None:
    """Messages start with the key below the task, so that the caller can put the rest of the path before them."""
    if config.source not in SOURCES:
        raise ValueError(f"source: {unknown_name('source', config.source, SOURCES)}")
    defaults = TaskConfig(source=config.source)
    for source, keys in _KEYS_OF.items():
        for key in sorted(keys):
            if source != config.source and getattr(config, key) != getattr(defaults, key):
                raise ValueError(f"{key}: has no effect with source: {config.source}; remove it")
    if config.size is not None and config.size < 1:
        raise ValueError(f"size = {config.size}, must be at least 1")
    try:
        fields = check_template(config.prompt)
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from None
    if config.source == "reasoning_gym":
        _check_reasoning_gym(config)
    else:
        _check_jsonl(config, fields)
    if config.demonstrations is None:
        if config.demonstration_params:
            raise ValueError("demonstration_params: has no effect without demonstrations; remove it")
        return
    try:
        make_writer(config.demonstrations, config.demonstration_params)
    except ValueError as error:
        raise ValueError(f"demonstrations: {error}") from error


def _check_reasoning_gym(config: TaskConfig) -> None:
    if config.name is None:
        raise ValueError("name: is missing; name one of reasoning-gym's datasets, for example chain_sum")
    if config.size is None:
        raise ValueError("size: is missing; say how many items to generate")
    files = dataset_files()
    if files is None:
        return
    if config.name not in files:
        raise ValueError(f"name: {unknown_name('reasoning-gym dataset', config.name, files)}")
    known = dataset_params(files[config.name])
    for key in config.params:
        if key in ("seed", "size"):
            raise ValueError(f"params.{key}: belongs one level up, beside name")
        if known is not None and key not in known:
            raise ValueError(f"params: {unknown_name(f'parameter of {config.name}', key, known - {'seed', 'size'})}")


def _check_jsonl(config: TaskConfig, fields: list[str]) -> None:
    if config.path is None:
        raise ValueError("path: is missing; give the JSONL file")
    needed = {"prompt_key": config.prompt_key}
    if config.answer_key != TaskConfig(source="jsonl").answer_key:
        needed["answer_key"] = config.answer_key  # the default may be absent: not every task has a gold answer
    if config.demonstrations is not None and config.demonstrations.startswith(COLUMN):
        needed["demonstrations"] = config.demonstrations.removeprefix(COLUMN)
    try:
        rows = list(islice(read_jsonl(Path(config.path)), _ROWS))
    except ValueError as error:
        raise ValueError(f"path: {error}") from error
    if not rows:
        raise ValueError(f"path: {config.path} is empty")
    for number, row in rows:
        columns = row.keys() | (row["metadata"].keys() if isinstance(row.get("metadata"), dict) else set())
        for key, column in needed.items():
            if column not in columns:
                raise ValueError(f"{key}: {config.path}, line {number}: {unknown_name('column', column, columns)}")
        for column in fields:
            if column != "prompt" and column not in columns:
                raise ValueError(f"prompt: {config.path}, line {number}: {unknown_name('column', column, columns)}")


@cache
def dataset_files() -> dict[str, Path] | None:
    """reasoning-gym's dataset names and the files that define them; None where it is not installed."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        return None
    files = {}
    for path in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "register_dataset(" not in text:
            continue
        constant = re.search(r'^DATASET_NAME = "(\w+)"', text, re.MULTILINE)
        literal = re.search(r'^register_dataset\(\s*"(\w+)"', text, re.MULTILINE)
        for match in (constant, literal):
            if match:
                files[match[1]] = path
    return files


@cache
def dataset_params(path: Path) -> frozenset[str] | None:
    """Field names of the config class that a dataset's file registers; None where the file does not show it plainly."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        call = node.value if isinstance(node, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "register_dataset"):
            continue
        config = call.args[2] if len(call.args) > 2 else None
        if isinstance(config, ast.Name) and config.id in classes and not classes[config.id].bases:
            return frozenset(
                field.target.id
                for field in classes[config.id].body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )
    return None
