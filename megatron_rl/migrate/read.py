"""Reading a configuration from elsewhere: a YAML file, a launch script with `key=value`, or such words themselves."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.base.messages import ConfigError, errors_named, leaves
from megatron_rl.base.plugins import read_text

Flat = dict[str, Any]  # dotted key to value; lists and empty mappings are values
_MOST_BYTES = 2**22
_OVERRIDE = re.compile(r"(?:\+{1,2}|~)?([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


def read(path: Path, overrides: Sequence[str]) -> Flat:
    """The file's keys with the overrides on top. Interpolations are resolved where what they name is there.

    Raises:
        ConfigError: the file cannot be read, or an override is not of the form key=value.
    """
    with errors_named(f"{path} cannot be read", OSError, ValueError, as_error=ConfigError):
        text = read_text(path, _MOST_BYTES)
    flat = _script(text) if path.suffix not in (".yaml", ".yml") else _document(path, text)
    for override in overrides:
        found = _OVERRIDE.fullmatch(override) or _ASSIGNMENT.fullmatch(override)
        if found is None:
            raise ConfigError(f"override `{override}`: write key=value, as on the command line there")
        flat[found[1]] = _value(found[2], {})
    return flat


def _document(path: Path, text: str) -> Flat:
    tree = OmegaConf.create(_with_defaults(path, text, ()))
    if not OmegaConf.has_resolver("mul"):
        OmegaConf.register_resolver("mul", lambda a, b: a * b)  # NeMo-RL's
    flat: Flat = {}
    for key, value in leaves(OmegaConf.to_container(tree, resolve=False)):
        if isinstance(value, str) and "${" in value:
            with contextlib.suppress(OmegaConfBaseException):  # else text, which is reported as it stands
                value = OmegaConf.select(tree, key)
        if value != "???":
            flat[key] = value
    return flat


def _with_defaults(path: Path, text: str, chain: tuple[Path, ...]) -> dict[str, Any]:
    """The document on top of the files beside it that its `defaults` names, where they are there."""
    try:
        tree = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections")
    named = tree.pop("defaults", None) or []
    for name in reversed(named if isinstance(named, list) else [named]):
        below = path.parent / name if isinstance(name, str) else path
        if below.suffix in (".yaml", ".yml") and below.is_file() and below not in (*chain, path):
            tree = _over(tree, _with_defaults(below, read_text(below, _MOST_BYTES), (*chain, path)))
    return tree


def _over(upper: Mapping[str, Any], lower: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, all else is the upper one's."""
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        merged[name] = _over(value, below) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def _script(text: str) -> Flat:
    """The dotted `key=value` of a shell script, with its own variables filled in."""
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
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?e[+-]?\d+", value, re.IGNORECASE):
        return float(value)  # YAML 1.1 wants a point in 1e-6
    return value
