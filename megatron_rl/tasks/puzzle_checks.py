"""Parameters and fields of reasoning-gym's datasets, read from its source files without importing the package.

Importing it takes seconds, too long for `--check`. So the class with a dataset's parameters is taken from its file and
defined here on its own; where it needs more than the standard library, its values stay unchecked until the task is loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.base.messages import show
from megatron_rl.base.typed_params import Params, check_types

_OWN_FIELDS = {"prompt", "question", "source_dataset", "source_params"}  # of every dataset's items


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
        for name in re.findall(r'^(?:DATASET_NAME = |register_dataset\(\s*)"(\w+)"', text, re.MULTILINE):
            files[name] = path
    return files


@cache
def dataset_params(path: Path) -> frozenset[str] | None:
    """Field names of the config class that a dataset's file registers; None where the file does not show it plainly."""
    cls = _registered(path)[1]
    if cls is None or cls.bases:
        return None
    targets = [node.target for node in cls.body if isinstance(node, ast.AnnAssign)]
    return frozenset(target.id for target in targets if isinstance(target, ast.Name))


def check_dataset_params(path: Path, params: Params, seed: int, size: int) -> None:
    """The dataset's own conditions on its parameters.

    Args:
        path: the file that defines the dataset.
        params: known names only.

    Raises:
        ValueError: naming the parameter or the condition that does not hold.
    """
    cls = _config_class(path)
    if cls is None:
        return
    hints, defaults = typing.get_type_hints(cls), vars(cls)
    sound = {name for name in params if name in hints and _is_default(hints[name], defaults.get(name))}
    check_types(cls, {name: value for name, value in params.items() if name in sound})
    try:
        config = cls(**params, seed=seed, size=size)
        if hasattr(config, "validate"):
            config.validate()
    except (NameError, AttributeError, ImportError):  # it needs more of the package than is defined here
        return
    except (AssertionError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        given = ", ".join(f"{name} = {show(value)}" for name, value in params.items()) or "the defaults"
        raise ValueError(f"{given}, seed = {seed}, size = {size}: {error}") from None


def has_field(path: Path, field: str) -> bool:
    """Whether an item of the dataset can have this field: False where no file in its folder has the word."""
    return field in _OWN_FIELDS or re.search(rf"\b{re.escape(field)}\b", _sources(path.parent)) is not None


def _is_default(hint: object, default: object) -> bool:
    """Whether the annotation can be relied on: the default is of that type, too."""

    def takes(value: object) -> None: ...

    takes.__annotations__ = {"value": hint}
    try:
        check_types(takes, {"value": default})
    except ValueError:
        return False
    return True


@cache
def _sources(folder: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


@cache
def _registered(path: Path) -> tuple[ast.Module, ast.ClassDef | None]:
    """The file's syntax tree, and in it the class that it registers for a dataset's parameters; None where it shows none."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        match node:
            case ast.Expr(ast.Call(ast.Name("register_dataset"), [_, _, ast.Name(name), *_])):
                return tree, classes.get(name)
    return tree, None


@cache
def _config_class(path: Path) -> Callable[..., Any] | None:
    """The class that the file registers for its parameters; None where it cannot be made on its own."""
    tree, config_class = _registered(path)
    if config_class is None:
        return None
    names: dict[str, Any] = {"__name__": __name__}  # dataclasses look for the module
    for node in tree.body:
        if node is config_class or _is_plain(node):
            try:
                exec(compile(ast.Module([node], []), str(path), "exec", dont_inherit=True), names)
            except (NameError, AttributeError, ImportError):
                if node is config_class:
                    return None
    return names.get(config_class.name)


def _is_plain(node: ast.stmt) -> bool:
    """Imports of the standard library, constants and enumerations."""
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] in sys.stdlib_module_names for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").partition(".")[0] in sys.stdlib_module_names
    if isinstance(node, ast.Assign):
        try:
            ast.literal_eval(node.value)
        except ValueError:
            return False
        return True
    return isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)
