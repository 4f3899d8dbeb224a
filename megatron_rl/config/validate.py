"""Checks nested data against the schema, with pydantic, and says what is wrong: key, value, and the nearest valid key."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatron_rl.base.messages import ConfigError, nearest, shorten, show
from megatron_rl.base.typed_params import fields, join, locate, must_be, unwrap
from megatron_rl.config import elsewhere
from megatron_rl.config.keys import Section, entry_type
from megatron_rl.config.schema import Config

Tree: TypeAlias = dict[str, Any]  # a recipe as nested plain data
_MOST = 10  # problems of one source that are listed
_ADAPTERS: dict[type[Section], TypeAdapter[Any]] = {}  # made once: that takes as long as the rest of loading a recipe


def validated[S: Section](section: type[S], tree: object, source: str, key: str = "") -> S:
    """The section that nested data describes, with the schema's defaults.

    Args:
        source: of the data, in messages.
        key: of the section.

    Raises:
        ConfigError: a line per problem, with `source`, the full key, its value, and the nearest valid key or what it must be.
    """
    try:
        return _adapter(section).validate_python(tree)
    except ValidationError as error:
        _refuse(error.errors(include_url=False), section, source, key)
        raise


def check_source(tree: object, source: str) -> None:
    """Checks what one source sets. Others may set what it leaves out; a value with an interpolation (`${...}`) is checked
    once it is resolved; and an entry of `rewards` or of `tasks.*` may be null, which asks for its removal.

    Raises:
        ConfigError: as `validated`.
    """
    try:
        _adapter(Config).validate_python(tree)
    except ValidationError as error:
        _refuse([each for each in error.errors(include_url=False) if not _is_left_open(each)], Config, source, "")


def problems(section: Section, key: str = "") -> Iterator[str]:
    """A sentence per value of a section, and of those in it, that is not as declared."""
    try:
        _adapter(type(section)).validate_python(section)
    except ValidationError as error:
        yield from _sentences(error.errors(include_url=False), type(section), key)


def prepare() -> None:
    """Makes what the first check of a recipe waits for."""
    _adapter(Config)


def _adapter[S: Section](section: type[S]) -> TypeAdapter[S]:
    if section not in _ADAPTERS:
        _ADAPTERS[section] = TypeAdapter(section)
    return _ADAPTERS[section]


def _is_left_open(error: ErrorDetails) -> bool:
    value, place = error["input"], error["loc"]
    is_entry = dataclasses.is_dataclass(entry_type(unwrap(locate(Config, place[:-1])[1])[0]))
    return error["type"] == "missing" or (isinstance(value, str) and "${" in value) or (value is None and is_entry)


def _refuse(errors: Sequence[ErrorDetails], section: type[Section], source: str, key: str) -> None:
    if errors:
        more = [f"and {len(errors) - _MOST} more"] if len(errors) > _MOST else []
        raise ConfigError("\n".join(f"{source}: {each}" for each in [*_sentences(errors[:_MOST], section, key), *more]))


def _sentences(errors: Sequence[ErrorDetails], section: type[Section], key: str) -> Iterator[str]:
    for error in errors:
        location, hint = locate(section, error["loc"])
        where, value = shorten(join(key, location)), error["input"]
        if error["type"] == "invalid_key":
            section_of = f"in `{join(key, location[:-1])}` " if join(key, location[:-1]) else ""
            yield f"the key {show(value)} {section_of}is not text; put it in quotes"
        elif error["type"] == "unexpected_keyword_argument":
            cls = unwrap(locate(section, location[:-1])[1])[0]
            instead = elsewhere.hint(where, value) or _nearest(
                str(location[-1]), typing.cast(type, cls), join(key, location[:-1])
            )
            said = "" if isinstance(value, Mapping | list) else f" (set to {show(value)})"
            yield f"unknown key `{where}`{said}; {instead}"
        elif error["loc"][-1:] == ("[key]",) and error["type"] == "string_type":
            yield f"the name {value!r} in `{join(key, location[:-1])}` is not text; put it in quotes"
        elif error["loc"][-1:] == ("[key]",):
            names = typing.get_args(unwrap(locate(section, location[:-1])[1])[0])[0]
            yield f"the name {show(value)} in `{join(key, location[:-1])}` {must_be([error], names)}"
        elif error["type"] == "dict_type":
            none = value is None and dataclasses.is_dataclass(entry_type(unwrap(hint)[0]))
            more = f"; to remove an entry: {where}.NAME=null" if none else ""
            yield f"`{where}` is a mapping from names to values, not {show(value)}{more}"
        elif error["type"] == "dataclass_type":
            yield f"{f'`{where}`' if where else 'a recipe'} is a section with keys of its own, not {show(value)}"
        else:
            yield f"`{where}` {must_be([error], hint)}{elsewhere.remedy(where, value)}"


def _nearest(name: str, cls: type, key: str) -> str:
    """A near name in the same section, else the same name in another one, else a less near one, else all of them."""
    known = fields(cls)
    sibling = nearest(name, known, 0.75)
    if sibling is None:
        others = [path for path in _all_keys(Config, "") if path.rpartition(".")[2] == name]
        inside = [path for path in others if key and path.startswith(key + ".")]
        if others:
            return "did you mean " + " or ".join(f"`{path}`" for path in (inside or others)) + "?"
        sibling = nearest(name, known, 0.5)
    if sibling is not None:
        return f"did you mean `{join(key, [sibling])}`?"
    return f"{f'`{key}`' if key else 'a recipe'} has the keys {', '.join(known)}"


def _all_keys(hint: object, key: str) -> Iterator[str]:
    hint = unwrap(hint)[0]
    if key:
        yield key
    if dataclasses.is_dataclass(hint):
        for name, inner in fields(typing.cast(type, hint)).items():
            yield from _all_keys(inner, join(key, [name]))
    elif dataclasses.is_dataclass(entry_type(hint)):
        yield from _all_keys(entry_type(hint), f"{key}.<name>")
