"""What the source files of reasoning-gym say about a dataset's parameters and fields, without importing the package.

Importing it takes seconds, and `--check` answers at once. So the class with a dataset's parameters is taken out of its file
and made here on its own; where it needs more than the standard library, its values stay unchecked until the task is loaded.
"""

from __future__ import annotations

import ast
import re
import sys
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.names import show
from megatron_rl.parameters import check_types

_OWN_FIELDS = {"prompt", "question", "source_dataset", "source_params"}  # of every dataset's items


def check_values(path: Path, params: Mapping[str, Any], seed: int, size: int) -> None:
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
    except (NameError, AttributeError, ImportError):  # it needs more of the package than was made here
        return
    except (AssertionError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ValueError(f"{_listed(params) or 'the defaults'}, seed = {seed}, size = {size}: {error}") from None


def has_field(path: Path, field: str) -> bool:
    """Whether an item of the dataset can have this field: False where the word is nowhere in the files beside its own."""
    return field in _OWN_FIELDS or re.search(rf"\b{re.escape(field)}\b", _sources(path.parent)) is not None


def _listed(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {show(value)}" for name, value in params.items())


def _is_default(hint: Any, default: Any) -> bool:
    """Whether the annotation can be relied on: the default is of that type, too."""
    try:
        check_types(_typed(hint), {"value": default})
    except ValueError:
        return False
    return True


def _typed(hint: Any) -> Any:
    def takes(value: Any) -> None: ...

    takes.__annotations__ = {"value": hint}
    return takes


@cache
def _sources(folder: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


@cache
def _config_class(path: Path) -> Any:
    """The class that the file registers for its parameters; None where it cannot be made on its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    registered = [
        node.value.args[2].id
        for node in tree.body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "register_dataset"
        and len(node.value.args) > 2
        and isinstance(node.value.args[2], ast.Name)
    ]
    if not registered:
        return None
    names: dict[str, Any] = {"__name__": __name__}  # dataclasses look for the module
    for node in tree.body:
        if not _is_plain(node, registered[0]):
            continue
        try:
            exec(compile(ast.Module([node], []), str(path), "exec", dont_inherit=True), names)
        except (NameError, AttributeError, ImportError):
            if isinstance(node, ast.ClassDef) and node.name == registered[0]:
                return None
    return names.get(registered[0])


def _is_plain(node: ast.stmt, wanted: str) -> bool:
    """Imports of the standard library, constants, enumerations and the wanted class."""
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
    return isinstance(node, ast.ClassDef) and (node.name == wanted or any("Enum" in ast.unparse(b) for b in node.bases))
