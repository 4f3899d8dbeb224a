"""Reading a configuration from elsewhere: a YAML file, a launch script with `key=value`, or such words themselves."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.base.messages import ConfigError, errors_named, leaves
from megatron_rl.base.plugins import MOST_YAML_BYTES, read_text
from megatron_rl.config.load import read_sections, yaml_value

Flat = dict[str, Any]  # dotted key to value; lists and empty mappings are values
_YAML = (".yaml", ".yml")
_OVERRIDE = re.compile(r"(?:\+{1,2}|~)?([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


def read(path: Path, overrides: Sequence[str]) -> Flat:
    """The file's keys with the overrides on top. Interpolations are resolved where what they name is there.

    Raises:
        ConfigError: the file cannot be read, or an override is not of the form key=value.
    """
    flat = _document(path) if path.suffix in _YAML else _script(path)
    for override in overrides:
        found = _OVERRIDE.fullmatch(override) or _ASSIGNMENT.fullmatch(override)
        if found is None:
            raise ConfigError(f"override `{override}`: write key=value, as on the command line there")
        flat[found[1]] = _value(found[2], {})
    return flat


def _document(path: Path) -> Flat:
    tree = OmegaConf.create(_with_defaults(path, ()))
    if not OmegaConf.has_resolver("mul"):
        OmegaConf.register_resolver("mul", lambda a, b: a * b)  # NeMo-RL's
    flat: Flat = {}
    for key, value in leaves(OmegaConf.to_container(tree, resolve=False)):
        if "${" in repr(value):
            with contextlib.suppress(OmegaConfBaseException):  # else text, which is reported as it stands
                value = OmegaConf.select(tree, key)
                value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        flat |= {name: each for name, each in leaves(value, key) if each != "???"}
    return flat


def _with_defaults(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """The document on top of the files beside it that its `defaults` names, where they are there."""
    tree = read_sections(path, str(path))
    named = tree.pop("defaults", None) or []
    for name in reversed(named if isinstance(named, list) else [named]):
        below = path.parent / name if isinstance(name, str) else path
        if below.suffix in _YAML and below.is_file() and below not in (*chain, path):
            tree = _over(tree, _with_defaults(below, (*chain, path)))
    return tree


def _over(upper: Mapping[str, Any], lower: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, all else is the upper one's."""
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        merged[name] = _over(value, below) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def _script(path: Path) -> Flat:
    """The dotted `key=value` of a shell script, with its own variables filled in."""
    with errors_named(f"{path} cannot be read", OSError, ValueError, as_error=ConfigError):
        text = read_text(path, MOST_YAML_BYTES)
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # an open quotation mark, say of a here-document
        words = text.replace("\\\n", " ").split()
    variables: dict[str, str] = {}
    flat: Flat = {}
    for word in words:
        if (found := _OVERRIDE.fullmatch(word)) is not None:
            flat[found[1]] = _value(found[2], variables)
        elif (found := _ASSIGNMENT.fullmatch(word)) is not None:
            variables[found[1]] = _filled(found[2], variables)
    return flat


def _filled(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    return _VARIABLE.sub(value, text)


def _value(text: str, variables: Mapping[str, str]) -> Any:
    text = _filled(text, variables)
    try:
        return yaml_value(text, text)
    except ConfigError:
        return text
