"""Tool calls as JSON values."""

from __future__ import annotations

import contextlib
import json

from megatron_rl.data.sample import Call


def as_call(value: object, keys: tuple[str, ...] = ("parameters",)) -> Call | None:
    """A JSON value as a call: an object with a `name` (text) and, under one of `keys`, an object; else None."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    for key in keys:
        if isinstance(value.get(key), dict):
            return {"name": value["name"], "parameters": value[key]}
    return None


def load_json(text: str) -> object:
    """The JSON value of a text; None where it is not JSON, or `null`."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None
