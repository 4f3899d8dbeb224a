"""How a recipe key is declared: type with range or choices, default, meaning; and the types that several keys share.

Pydantic reads the declarations (`validate`). A range's upper bound is far above any real run: it catches extra zeros, which
would otherwise show hours later, when memory runs out, or never.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from megatron_rl.base.messages import LARGEST, shorten, show
from megatron_rl.base.typed_params import STRICT, join

MOST_LEVELS = 50  # of sections, mappings and lists in one another

Count = Annotated[int, Field(ge=1, le=1e6)]
CountOrNone = Annotated[int, Field(ge=0, le=1e6)]
Pixels = Annotated[int, Field(ge=1, le=1e8)]
Steps = Annotated[int, Field(ge=1, le=1e9)]
StepsOrNone = Annotated[int, Field(ge=0, le=1e9)]
Tokens = Annotated[int, Field(ge=1, le=1e9)]
Ranks = Annotated[int, Field(ge=1, le=1e5)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Minutes = Annotated[float, Field(ge=0.001, le=1e6)]  # 0.06 s to two years
Wait = Annotated[float, Field(ge=0, le=1e6)]  # minutes
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$")]  # of a task or a reward
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


class Section:
    """A section of recipes. Values are not converted (strict), and unknown keys are refused."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        cast(dict[str, Any], handler.resolve_ref_schema(schema))["strict"] = False  # a mapping describes one
        return schema


def key[T](default: T = dataclasses.MISSING, meaning: str = "") -> T:  # type: ignore[assignment]
    """A field of a section: its default, none where it must be set, and what docs/recipes.md says of it (Markdown)."""
    metadata = {"description": meaning}  # pydantic's name
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def meaning(of: dataclasses.Field[Any]) -> str:
    """The text of docs/recipes.md on a key."""
    return str(of.metadata.get("description", ""))


def choices(hint: object) -> tuple[str, ...]:
    """The words of a `Literal`; none of any other type."""
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def entry_type(hint: object) -> object:
    """The X of `dict[str, X]`; None for any other type."""
    return typing.get_args(hint)[1] if typing.get_origin(hint) is dict else None


def _plain(value: object, path: tuple[int | str, ...] = ()) -> object:
    """The value of a key whose own parameters are checked elsewhere: what YAML holds, not nested too deeply."""
    where = f"`{join('', path)}` in it " if path else ""
    if isinstance(value, Mapping | list) and len(path) > MOST_LEVELS:
        raise ValueError(f"is nested more than {MOST_LEVELS} levels deep")
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(f"has the name {name!r}, which is not text; put it in quotes")
            _plain(name, path)
            _plain(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _plain(item, (*path, index))
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{where}must be from -2^63 to 2^63 - 1; it is {show(value)}")
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where}holds bytes that are no text in UTF-8: {shorten(value)!a}")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"{where}must be text, a number, a list or a mapping, not {show(value)}")
    return value


Params = Annotated[dict[str, Any], AfterValidator(_plain)]
