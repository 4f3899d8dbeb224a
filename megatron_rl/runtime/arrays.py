"""Arrays that a run has recorded."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np

from megatron_rl.base.messages import errors_named

_DAMAGE = (EOFError, OSError, TypeError, ValueError, zipfile.BadZipFile, zlib.error)


def read_arrays(path: Path, needed: Collection[str], what: str) -> dict[str, np.ndarray]:
    """All arrays of a `.npz` file, by name. `what`: the file should be, in messages.

    Raises:
        ValueError: it is missing or damaged, or lacks one of `needed`.
    """
    with errors_named(f"{path} cannot be read", *_DAMAGE), np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    if missing := set(needed) - arrays.keys():
        raise ValueError(f"{path} is not {what}: it lacks {', '.join(sorted(missing))}")
    return arrays
