"""Values that a recipe sets, held against the annotations that declare them: types, `Literal` choices, ranges."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from megatron_rl.base.messages import did_you_mean, show, unknown_name

Params: TypeAlias = Mapping[str, Any]  # by name; `check_types` holds the values against annotations
_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


@dataclass(frozen=True)
class Range:
    """Bounds of a number, for `Annotated[float, Range(low=0)]`: `low` and `high` are allowed, `above` and `below` are not."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    finite: bool = False

    def broken(self, value: float) -> str | None:
        """The first bound that `value` breaks, in words; None where it keeps all. A NaN breaks every bound."""
        return next((words for words, holds in self._bounds(value) if not holds), None)

    def __str__(self) -> str:
        return " and ".join(words for words, _ in self._bounds(0))

    def _bounds(self, value: float) -> Iterator[tuple[str, bool]]:
        if self.low is not None:
            yield f"at least {_number(self.low)}", value >= self.low
        if self.above is not None:
            yield f"greater than {_number(self.above)}", value > self.above
        if self.high is not None:
            yield f"at most {_number(self.high)}", value <= self.high
        if self.below is not None:
            yield f"less than {_number(self.below)}", value < self.below
        if self.finite:
            yield "a finite number", math.isfinite(value)


NonNegative = Annotated[float, Range(low=0)]
Positive = Annotated[float, Range(above=0)]


def _number(bound: float) -> str:
    return f"{bound:,.0f}" if abs(bound) >= 1000 else f"{bound:g}"


def check_params(function: Callable[..., object], params: Mapping[str, object], of: str) -> None:
    """`check_types`, and no parameter that `function` does not take.

    Raises:
        ValueError: naming `of` and the nearest parameter, or as `check_types`.
    """
    known = inspect.signature(function).parameters
    for name in params:
        if name not in known:
            raise ValueError(unknown_name(f"parameter of {of}", name, known))
    check_types(function, params)


def check_types(function: Callable[..., object], params: Mapping[str, object]) -> None:
    """Null is allowed where it is the default, and anything where the annotation is not a plain type.

    Raises:
        ValueError: naming the first parameter whose value is of another type or out of its range, the value and the type.
    """
    hints, signature = hints_of(function), inspect.signature(function).parameters
    for name, value in params.items():
        hint = hints.get(name, object)
        if not _fits(value, hint) and (value is not None or signature[name].default is not None):
            near = did_you_mean(value, typing.get_args(hint)) if typing.get_origin(hint) is Literal else ""
            raise ValueError(f"{name} = {show(value)}, must be {_words(hint)}{near}")


def hints_of(function: Callable[..., object]) -> dict[str, object]:
    """The parameters' annotations, evaluated; those with names that exist for type checkers only are left out."""
    owner: Any = function
    if inspect.isclass(function) and not dataclasses.is_dataclass(function):
        owner = function.__init__
    with contextlib.suppress(NameError):
        return typing.get_type_hints(owner, include_extras=True)
    hints: dict[str, object] = {}
    for name, annotation in owner.__annotations__.items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(NameError):
            hints |= typing.get_type_hints(holder, owner.__globals__, include_extras=True)
    return hints


def arms(hint: object) -> tuple[object, ...]:
    """The alternatives of `X | Y`; of any other type, the type itself."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


def _fits(value: object, hint: object) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if len(arms(hint)) > 1:
        return any(_fits(value, arm) for arm in arms(hint))
    if origin is Annotated:
        ranges = [bounds for bounds in inner[1:] if isinstance(bounds, Range)]
        in_range = isinstance(value, int | float) and all(bounds.broken(value) is None for bounds in ranges)
        return _fits(value, inner[0]) and (in_range or not ranges)
    if origin is Literal:
        return value in inner
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, type(None)):
        return isinstance(value, hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    return True


def _words(hint: object) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if len(arms(hint)) > 1:
        return " or ".join(_words(arm) for arm in arms(hint))
    if origin is Annotated:
        return " ".join([_words(inner[0]), *(str(each) for each in inner[1:] if isinstance(each, Range))])
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin is list:
        return "a list"
    if origin is dict:
        return "a mapping"
    return _WORDS.get(hint, "something else")
