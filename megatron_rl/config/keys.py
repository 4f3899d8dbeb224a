"""How a recipe key is declared: default, meaning, and the types with ranges that several keys share.

A range's upper bound is far above any real run: it catches extra zeros, which would otherwise show hours later, when memory
runs out, or never.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import Field, field
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from megatron_rl.base.messages import did_you_mean
from megatron_rl.base.typed_params import Range, arms

T = TypeVar("T")
_MEANING = "meaning"

Count = Annotated[int, Range(1, 1e6)]
CountOrNone = Annotated[int, Range(0, 1e6)]
Pixels = Annotated[int, Range(1, 1e8)]
Steps = Annotated[int, Range(1, 1e9)]
StepsOrNone = Annotated[int, Range(0, 1e9)]
Tokens = Annotated[int, Range(1, 1e9)]
Ranks = Annotated[int, Range(1, 1e5)]
Minutes = Annotated[float, Range(0.001, 1e6)]  # 0.06 s to two years
Wait = Annotated[float, Range(0, 1e6)]  # minutes
Finite = Annotated[float, Range(finite=True)]
Positive = Annotated[float, Range(above=0, finite=True)]
NonNegative = Annotated[float, Range(low=0, finite=True)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(above=0, high=1)]


def key(default: T, meaning: str = "") -> T:
    """A field of a section: its default, and what docs/recipes.md says of it (Markdown)."""
    metadata = {_MEANING: meaning}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def meaning(of: Field[object]) -> str:
    return str(of.metadata.get(_MEANING, ""))


# ----------------------------------------------------------------------------------------------- reading declarations
@cache
def fields(section: type) -> dict[str, object]:
    """Names and types of a section's keys, ranges included."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(section)}


def unwrap(hint: object) -> tuple[object, bool]:
    """`X | None` as (X, True), any other type as (X, False); without ranges, choices as text."""
    inner = next(arm for arm in arms(hint) if arm is not type(None))
    optional = len(arms(hint)) > 1
    if typing.get_origin(inner) is Annotated:
        inner = typing.get_args(inner)[0]
    return (str if typing.get_origin(inner) is Literal else inner), optional


def choices(hint: object) -> tuple[str, ...]:
    """The words of a `Literal`; none of any other type."""
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def entry_type(hint: object) -> object:
    """The X of `dict[str, X]`; None for any other type."""
    return typing.get_args(hint)[1] if typing.get_origin(hint) is dict else None


def problems(section: object, path: str = "") -> Iterator[str]:
    """A sentence per value of a section, and of those in it, that is not among its choices or out of its range."""
    cls: type = type(section)
    for name, hint in fields(cls).items():
        yield from _problems(getattr(section, name), hint, f"{path}.{name}" if path else name)


def _problems(value: object, hint: object, where: str) -> Iterator[str]:
    inner = unwrap(hint)[0]
    if value is None or inner is Any:
        return
    if dataclasses.is_dataclass(value):
        yield from problems(value, where)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _problems(item, entry_type(inner), f"{where}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(item, typing.get_args(inner)[0], f"{where}[{index}]")
    elif (words := broken(value, hint)) is not None:
        yield f"`{where}` must be {words}"


def broken(value: object, hint: object) -> str | None:
    """Which choices or bound a value of the right type breaks, in words after "must be"; None where it keeps them."""
    for arm in arms(hint):
        if typing.get_origin(arm) is Literal and value not in typing.get_args(arm):
            known = typing.get_args(arm)
            return f"one of {', '.join(known)}; it is {value!r}{did_you_mean(value, known)}"
        if typing.get_origin(arm) is Annotated:
            for each in typing.get_args(arm)[1:]:
                if (words := each.broken(value)) is not None:
                    return f"{words}; it is {value!r}"
    return None
