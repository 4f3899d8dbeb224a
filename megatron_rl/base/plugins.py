"""Files that a recipe or a command names: regular ones only, since a pipe or a device is waited for without end. Of them
Python files: rewards, sources of prompts and plugins of the user's own."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_rl.base import shipped
from megatron_rl.base.messages import errors_named

if TYPE_CHECKING:
    from yaml import Node

MOST_YAML_BYTES = 2**22
MOST_VALUES = 100_000  # in a YAML file with its aliases written out
# What PyYAML raises beside its own errors: on numbers of thousands of digits, impossible dates, deep nesting, and text that
# does not fit its tag (`!!timestamp x`).
NOT_OF_YAML = (ValueError, OverflowError, RecursionError, AttributeError, LookupError, TypeError)

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def require_regular(path: str | os.PathLike[str]) -> None:
    """Links are followed.

    Raises:
        ValueError: the path is a folder, a pipe, a device or a socket, or no path at all; it says which.
        OSError: there is nothing, or it cannot be looked at.
    """
    mode = os.stat(path).st_mode
    for is_kind, kind in _KINDS:
        if is_kind(mode):
            remedy = "" if kind == "a folder" else "; write what it gives into a file, and name that"
            raise ValueError(f"{Path(path)} is {kind}, not a file{remedy}")


def read_text(path: str | os.PathLike[str], most_bytes: int) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        ValueError: as above, or it is larger than `most_bytes`, or not UTF-8 (`UnicodeDecodeError`).
        OSError: it cannot be read.
    """
    require_regular(path)
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{Path(path)} has more than {most_bytes:,} bytes")
    return data.decode("utf-8-sig")


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """A YAML file's plain values: of a recipe that a run has kept, which may be a stranger's.

    Raises:
        ValueError: as `read_text`, or it is no YAML, or its aliases are more than `MOST_VALUES` values.
        OSError: it cannot be read.
    """
    import yaml

    text = read_text(path, MOST_YAML_BYTES)
    try:
        if "*" in text and expanded(yaml.compose(text, yaml.SafeLoader), {}) > MOST_VALUES:
            raise yaml.YAMLError(f"it has more than {MOST_VALUES:,} values, with its aliases written out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, *NOT_OF_YAML) as error:
        raise ValueError(f"{Path(path)} is not YAML: {error or type(error).__name__}") from None


def expanded(node: Node | None, known: dict[int, float]) -> float:
    """How many values a YAML document has once its aliases are copies; infinite where one holds itself."""
    from yaml import CollectionNode, SequenceNode

    if not isinstance(node, CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = float("inf")
        inner = node.value if isinstance(node, SequenceNode) else [item for pair in node.value for item in pair]
        known[id(node)] = 1 + sum(expanded(item, known) for item in inner)
    return known[id(node)]


def is_module_name(name: str) -> bool:
    """Whether this is how `import` would take it, from the top."""
    return all(part.isidentifier() for part in name.split("."))


def load_file(path: str | Path) -> ModuleType:
    """The module of a Python file, executed once per process; what it raises is not caught.

    It is among `sys.modules`, under a name of its own: dataclasses and pickle look there.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = shipped.find_file(Path(path).expanduser()).resolve()
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    name = f"megatron_rl_user_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_function(name: str, what: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:function` or `package.module:function` names.

    Args:
        what: the function is for, in messages.

    Raises:
        ValueError: it cannot be loaded.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name.endswith(".py") and not is_module_name(module_name):
        raise ValueError(
            f"the {what} {name!r} names neither a Python file nor a module; write file.py:function or module:function"
        )
    with errors_named(f"cannot load the {what} {name!r}", ImportError, OSError, RuntimeError):
        module = load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    if not callable(function := getattr(module, attribute, None)):
        raise ValueError(f"cannot load the {what} {name!r}: {module_name} has no function {attribute!r}")
    return function


def source_digest(name: str) -> str | None:
    """A digest of the Python file that `load_function` would take `name` from, without loading it; None where it is no such
    name, or there is no file. What the file imports is not looked at."""
    module_name, _, attribute = name.rpartition(":")
    if not attribute.isidentifier():
        return None
    path: Path | None = None
    if module_name.endswith(".py"):
        path = shipped.find_file(Path(module_name).expanduser())
    elif is_module_name(module_name):
        with contextlib.suppress(ImportError, ValueError):  # a package above it is missing; a module without a spec
            spec = importlib.util.find_spec(module_name)
            path = None if spec is None or spec.origin is None else Path(spec.origin)
    if path is None or not path.is_file():
        return None
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
