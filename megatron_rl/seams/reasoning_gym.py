"""reasoning_gym: without matplotlib. Written for 0.1.25, with cellpylib 2.4.

Two of its hundred datasets compute with cellpylib, which can also plot, and so imports all of matplotlib: 0.25 CPU seconds of
a rank.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

CELLS = "cellpylib"  # imported whole, as `import cellpylib as cpl`, by the files of those two


def load() -> ModuleType:
    """The package reasoning_gym; its modules get cellpylib when they first use something of it."""
    if "reasoning_gym" in sys.modules or CELLS in sys.modules:
        return importlib.import_module("reasoning_gym")
    sys.modules[CELLS] = _Later(CELLS)
    try:
        return importlib.import_module("reasoning_gym")
    finally:
        del sys.modules[CELLS]


class _Later(ModuleType):
    """A placeholder for a module: imports it when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)
