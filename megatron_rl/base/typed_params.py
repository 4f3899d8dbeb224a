"""Checks values that a recipe sets against the annotations that declare them, with pydantic, and says what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatron_rl.base.messages import did_you_mean, show, unknown_name

Params: TypeAlias = Mapping[str, Any]  # by name; `check_types` holds the values against annotations
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]

STRICT = ConfigDict(strict=True, extra="forbid", revalidate_instances="always")  # no text as a number, no 1 as true
_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "none_required": "null",
    "list_type": "a list",
    "dict_type": "a mapping",
}
_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "greater than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
    "string_pattern_mismatch": "letters (a to z), digits, `_` and `-`",  # the one pattern is that of names
    "too_short": "a list of {min_length} values",
    "too_long": "a list of {max_length} values",
}


def check_params(function: Callable[..., object], params: Params, of: str) -> None:
    """`check_types`, and no parameter that `function` does not take.

    Raises:
        ValueError: naming `of` and the nearest parameter, or as `check_types`.
    """
    known = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for name in params:
        if name not in known and not takes_any:
            raise ValueError(unknown_name(f"parameter of {of}", name, known))
    check_types(function, params)


def check_arguments(function: Callable[..., object], params: Params, of: str) -> None:
    """`check_params`, and a value for every parameter that needs one.

    Raises:
        ValueError: naming `of` and the parameter.
    """
    check_params(function, params, of)
    for name, parameter in inspect.signature(function).parameters.items():
        is_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_any and name not in params:
            raise ValueError(f"{of}: the parameter {name!r} is missing")


def check_types(function: Callable[..., object], params: Params) -> None:
    """Null is allowed where it is the default, and anything where the annotation is not made of plain types.

    Raises:
        ValueError: naming the first parameter whose value is of another type or out of its range, the value and the type.
    """
    hints, signature = hints_of(function), inspect.signature(function).parameters
    for name, value in params.items():
        if name not in hints or not is_plain(hints[name]) or (value is None and signature[name].default is None):
            continue
        try:
            _adapter(function, name).validate_python(value)
        except ValidationError as error:
            raise ValueError("\n".join(refusals(error, hints[name], name))) from None


def refusals(error: ValidationError, hint: object, key: str) -> Iterator[str]:
    """A sentence per value of the type `hint` at `key`, or below it, that pydantic refuses: where, what it must be, value."""
    by_key: dict[str, tuple[object, list[ErrorDetails]]] = {}
    for each in error.errors(include_url=False):
        parts, inner = locate(hint, each["loc"])
        by_key.setdefault(join(key, parts), (inner, []))[1].append(each)
    for name, (inner, errors) in by_key.items():
        yield f"`{name}` {must_be(errors, inner)}"


def must_be(errors: Sequence[ErrorDetails], hint: object) -> str:
    """Says what a value of the type `hint` must be and is not, in words after its key. `errors`: one per type it may have."""
    kind, value, words, near = errors[-1]["type"], errors[0]["input"], [], ""
    if kind == "value_error":
        return str(errors[-1]["ctx"]["error"])
    if kind == "missing":
        return "must be set"
    if kind == "string_unicode":
        return f"holds bytes that are no text in UTF-8: {value!a:.80}"
    for error in errors:
        if error["type"] == "literal_error":
            known = next(typing.get_args(arm) for arm in arms(hint) if typing.get_origin(arm) is Literal)
            near = did_you_mean(value, known) if isinstance(value, str) else ""
            words.append(f"one of {', '.join(map(str, known))}")
        elif error["type"] in _BOUNDS:
            bounds = {
                name: _number(bound) for name, bound in error.get("ctx", {}).items() if isinstance(bound, int | float)
            }
            words.append(_BOUNDS[error["type"]].format(**bounds))
        else:
            words.append(_TYPES.get(error["type"], f"something else ({error['msg']})"))
    if kind not in _TYPES:
        return f"must be {' or '.join(words)}; it is {show(value)}{near}"
    words += ["null"] * (types.NoneType in arms(hint))
    quotes = "; put it in quotes" if "text" in words and isinstance(value, bool | int | float) else ""
    return f"must be {' or '.join(words)}, not {show(value)}{quotes}"


def _number(bound: float) -> str:
    return f"{bound:,.0f}" if abs(bound) >= 1000 else f"{bound:g}"


# ----------------------------------------------------------------------------------------------- reading declarations
def locate(hint: object, path: Sequence[int | str]) -> tuple[list[int | str], object]:
    """How far a path leads within a type, and the type that stands there; not into unions, nor into unknown keys."""
    for number, part in enumerate(path):
        inner = unwrap(hint)[0]
        if part == "[key]":  # pydantic's, of a mapping's name
            return [*path[:number]], hint
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            hint = fields(inner).get(str(part))
        elif typing.get_origin(inner) in (list, dict):
            hint = typing.get_args(inner)[-1]
        else:
            return [*path[:number]], hint
    return [*path], hint


def join(key: str, path: Sequence[int | str]) -> str:
    """A dotted key, with list entries in brackets."""
    for part in path:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    return key


@cache
def fields(section: Callable[..., object]) -> dict[str, object]:
    """Names and types of a dataclass's fields, ranges included."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(typing.cast(Any, section))}


def unwrap(hint: object) -> tuple[object, bool]:
    """`X | None` as (X, True), any other type as (X, False); without ranges."""
    rest = [arm for arm in arms(hint) if arm is not types.NoneType]
    inner = rest[0] if len(rest) == 1 else hint
    return (typing.get_args(inner)[0] if typing.get_origin(inner) is Annotated else inner), len(rest) < len(arms(hint))


def arms(hint: object) -> tuple[object, ...]:
    """The alternatives of `X | Y`; of any other type, the type itself."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


def is_plain(hint: object) -> bool:
    """Whether YAML can hold all values of a type: numbers, text, true, false, null, choices, lists and mappings of them."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return is_plain(inner[0])
    if origin in (list, dict) or len(arms(hint)) > 1:
        return all(map(is_plain, inner))
    return origin is Literal or hint in (bool, int, float, str, types.NoneType, Any)


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


@cache
def _adapter(function: Callable[..., object], name: str) -> TypeAdapter[object]:
    hint: Any = hints_of(function)[name]
    return TypeAdapter(hint, config=STRICT)
