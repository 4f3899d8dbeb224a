"""Values as JSON that comes back as it was: tuples, keys that are no text, bytes, arrays bit for bit, rollouts.

Reading makes plain values and the classes below, whatever the file says: no code of it is run, as a pickle's would be.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_rl.data.rollout import Rollout, Segment

_MARK = "~"  # before the name of what JSON does not have; it is the object's only key
_KINDS = "biuf"  # of arrays: booleans, whole numbers, floats
_CLASSES = {cls.__name__: cls for cls in (Rollout, Segment)}


def to_json(value: object) -> Any:
    """The value in JSON's types.

    Raises:
        TypeError: it has something else in it; names the type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {f"{_MARK}dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {f"{_MARK}tuple": [to_json(item) for item in value]}
    if isinstance(value, bytes):
        return {f"{_MARK}bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {f"{_MARK}array": [value.dtype.str, list(value.shape), data]}
    if type(value).__name__ in _CLASSES:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}  # type: ignore[arg-type]
        return {f"{_MARK}{type(value).__name__}": {name: to_json(item) for name, item in fields.items()}}
    raise TypeError(f"{type(value).__name__} has no form in JSON here")


def from_json(written: Any) -> Any:
    """Undoes `to_json`.

    Raises:
        ValueError: an object that `to_json` does not write.
    """
    if isinstance(written, list):
        return [from_json(item) for item in written]
    if not isinstance(written, dict):
        return written
    name = next(iter(written), "")
    if not name.startswith(_MARK):
        return {key: from_json(item) for key, item in written.items()}
    make = _READ.get(name.removeprefix(_MARK))
    if make is None or len(written) != 1:
        raise ValueError(f"unknown object {name!r}")
    return make(written[name])


def _array(written: Any) -> np.ndarray:
    dtype, shape, data = np.dtype(written[0]), written[1], base64.b64decode(written[2])
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _object(cls: type) -> Callable[[Any], Any]:
    return lambda fields: cls(**{name: from_json(item) for name, item in fields.items()})


_READ: dict[str, Callable[[Any], Any]] = {
    "dict": lambda items: {from_json(key): from_json(item) for key, item in items},
    "tuple": lambda items: tuple(from_json(item) for item in items),
    "bytes": base64.b64decode,
    "array": _array,
    **{name: _object(cls) for name, cls in _CLASSES.items()},
}
