"""Checks nested data against the schema: unknown keys and wrong types, with the nearest valid key."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from megatron_rl.base.messages import LARGEST, ConfigError, did_you_mean, nearest, shorten, show
from megatron_rl.config import elsewhere
from megatron_rl.config.keys import choices, entry_type, fields, unwrap
from megatron_rl.config.schema import Config

Tree: TypeAlias = dict[str, Any]  # a recipe as nested plain data
MOST_LEVELS = 50  # of sections, mappings and lists in one another


def type_at(parts: list[str]) -> object:
    """Type of the key with this path, as `unwrap` gives it; None where the schema has no such key."""
    hint: object = Config
    for part in parts:
        hint = fields(hint).get(part) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else entry_type(hint)
        if hint is None:
            return None
        hint = unwrap(hint)[0]
    return hint


# Keys of earlier versions, which the recipe.yaml of an old run has.
_REPLACED = {
    "actor.logprob_chunk_tokens": "remove it, or set `actor.logits_mib` (MiB of logits that exist at once)",
    "algorithm.overlong.max_length": "remove it: the budget is `rollout.max_tokens`",
    "logging.samples_every": "remove it: every step has a sample file, unless `logging.samples_per_step` is 0",
}
_AS_NOW = {"algorithm.overlong.max_length": None, "logging.samples_every": 1}  # values that ask for what is done anyway


def conform(tree: object, source: str) -> Tree:
    """A copy of `tree`, the nested data of one source, with numbers converted to the schema's types.

    An entry of `rewards` or of `tasks.*` may be None: it asks for the entry's removal. Text with an interpolation
    (`${...}`) passes here; OmegaConf checks its value once it is resolved.

    Raises:
        ConfigError: naming `source`, the full key, its value, and the nearest valid key or the expected type.
    """
    return _section(tree, Config, "", source)


def _section(value: object, cls: type, key: str, source: str) -> Tree:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source}: {_subject(key)} is a section with keys of its own, not {show(value)}")
    known, result = fields(cls), {}
    for name, item in value.items():
        if name not in known:
            full = _join(key, name)
            if full in _AS_NOW and item == _AS_NOW[full]:
                continue
            remedy = _REPLACED.get(full) or elsewhere.hint(full, item) or _nearest(str(name), cls, key)
            raise ConfigError(f"{source}: unknown key `{shorten(full)}`{_set_to(item)}; {remedy}")
        result[name] = _value(item, known[name], _join(key, name), source)
    return result


def _value(value: object, hint: object, key: str, source: str) -> object:
    declared, (hint, optional) = hint, unwrap(hint)
    if (value is None and optional) or (isinstance(value, str) and "${" in value):
        return value
    if dataclasses.is_dataclass(hint):
        return _section(value, typing.cast(type, hint), key, source)
    if typing.get_origin(hint) is dict:
        return _mapping(value, entry_type(hint), key, source)
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{source}: `{key}` must be a list, not {show(value)}")
        item = typing.get_args(hint)[0]
        return [_value(entry, item, f"{key}[{index}]", source) for index, entry in enumerate(value)]
    return _scalar(value, hint, choices(declared), optional, key, source)


def _mapping(value: object, entry: object, key: str, source: str) -> Tree:
    if not isinstance(value, Mapping):
        none = f"; to remove an entry: {key}.NAME=null" if value is None and dataclasses.is_dataclass(entry) else ""
        raise ConfigError(f"{source}: `{key}` is a mapping from names to values, not {show(value)}{none}")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{source}: the name {name!r} in `{key}` is not text; put it in quotes")
        _check_scalar(name, f"{key}.{shorten(name)!a}", source)
    if entry is Any:
        return {name: _anything(item, _join(key, name), source) for name, item in value.items()}
    return {
        name: None if item is None else _value(item, entry, _join(key, name), source) for name, item in value.items()
    }


def _anything(value: object, key: str, source: str) -> object:
    if isinstance(value, Mapping | list) and key.count(".") + key.count("[") > MOST_LEVELS:
        raise ConfigError(f"{source}: `{shorten(key)}` is nested more than {MOST_LEVELS} levels deep")
    if isinstance(value, Mapping):
        return _mapping(value, Any, key, source)
    if isinstance(value, list):
        return [_anything(item, f"{key}[{index}]", source) for index, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        _check_scalar(value, key, source)
        return value
    raise ConfigError(f"{source}: `{key}` must be text, a number, a list or a mapping, not {show(value)}")


def _scalar(value: object, hint: object, known: tuple[str, ...], optional: bool, key: str, source: str) -> object:
    _check_scalar(value, key, source)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if known and isinstance(value, str) and value not in known:
        raise ConfigError(
            f"{source}: `{key}` must be one of {', '.join(known)}; it is {show(value)}{did_you_mean(value, known)}"
        )
    if type(value) is hint:  # a bool is no int
        return value
    words: dict[object, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    remedy = "; put it in quotes" if hint is str and isinstance(value, (bool, int, float)) else ""
    raise ConfigError(
        f"{source}: `{key}` must be {words[hint]}{' or null' if optional else ''}, not {show(value)}{remedy}"
    )


def _check_scalar(value: object, key: str, source: str) -> None:
    """Refuses integers beyond 64 bits and text that is not valid UTF-8."""
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError(f"{source}: `{key}` must be from -2^63 to 2^63 - 1; it is {show(value)}")
    if not isinstance(value, str):
        return
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{source}: `{key}` holds bytes that are no text in UTF-8: {shorten(value)!a}")


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _subject(key: str) -> str:
    return f"`{key}`" if key else "a recipe"


def _set_to(value: object) -> str:
    return "" if isinstance(value, (Mapping, list)) else f" (set to {show(value)})"


def _nearest(name: str, cls: type, key: str) -> str:
    """A near name in the same section, else the same name in another one, else a less near one, else all of them."""
    known = fields(cls)
    sibling = nearest(name, known, 0.75)
    if sibling is None:
        elsewhere = [path for path in _all_keys(Config, "") if path.rpartition(".")[2] == name]
        inside = [path for path in elsewhere if key and path.startswith(key + ".")]
        if elsewhere:
            return "did you mean " + " or ".join(f"`{path}`" for path in (inside or elsewhere)) + "?"
        sibling = nearest(name, known, 0.5)
    if sibling is not None:
        return f"did you mean `{_join(key, sibling)}`?"
    return f"{_subject(key)} has the keys {', '.join(known)}"


def _all_keys(hint: object, key: str) -> Iterator[str]:
    hint = unwrap(hint)[0]
    if key:
        yield key
    if dataclasses.is_dataclass(hint):
        for name, inner in fields(typing.cast(type, hint)).items():
            yield from _all_keys(inner, _join(key, name))
    elif dataclasses.is_dataclass(entry_type(hint)):
        yield from _all_keys(entry_type(hint), f"{key}.<name>")
