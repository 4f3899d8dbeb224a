"""Parameters that a recipe gives to a function: their types, from its annotations, and checks of their values."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.config.shape import show

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


def check_types(function: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Null is allowed where it is the default, and anything where the annotation is not a plain type.

    Raises:
        ValueError: naming the first parameter whose value is of another type, the value and the type.
    """
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # a function of the user's own, with names that exist for type checkers only
        return
    signature = inspect.signature(function).parameters
    for name, value in params.items():
        hint = hints.get(name, Any)
        if not _fits(value, hint) and (value is not None or signature[name].default is not None):
            raise ValueError(f"{name} = {show(value)}, must be {_words(hint)}")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return any(_fits(value, arm) for arm in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, type(None)):
        return isinstance(value, hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, typing.get_args(hint)[1]) for item in value.values())
    return True


def _words(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return " or ".join(_words(arm) for arm in typing.get_args(hint))
    if origin is list:
        return "a list"
    if origin is dict:
        return "a mapping"
    return _WORDS.get(hint, "something else")


def real(name: str, value: Any, low: float = float("-inf"), high: float = float("inf")) -> float:
    """A parameter that must be a number in [low, high]. ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} = {value!r}, must be a number from {low} to {high}")
    return float(value)


def whole(name: str, value: Any, low: int = 0) -> int:
    """A parameter that must be a whole number of at least `low`. ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} = {value!r}, must be a whole number of at least {low}")
    return value


def choice(name: str, value: Any, options: tuple[str, ...]) -> str:
    """A parameter that must be one of a few words. ValueError otherwise."""
    if value not in options:
        raise ValueError(f"{name} = {value!r}, must be one of {', '.join(options)}")
    return str(value)


def flag(name: str, value: Any) -> bool:
    """A parameter that must be true or false. ValueError otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}, must be true or false")
    return value
