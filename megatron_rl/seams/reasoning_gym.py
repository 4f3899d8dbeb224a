"""reasoning_gym: without matplotlib, and without `eval` of an answer. Written for 0.1.25, with cellpylib 2.4.

Two of its hundred datasets compute with cellpylib, which can also plot, and so imports all of matplotlib: 0.25 CPU seconds of
a rank.

Four verifiers give partial credit for an answer that is a Python list, which they read by `eval`, and a fifth reads the gold
answer so. Evaluated, a text could look the solution up among their local variables, or put something else in the place of a
builtin (a comprehension assigns), which would grade all later answers.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
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


def read_literals_only(score_answer: Callable[..., float]) -> None:
    """Makes a dataset's verifier read lists by `ast.literal_eval`: its module gets a function of that name.

    Raises:
        RuntimeError: the verifier does not call `eval`: the package has changed.
    """
    code = getattr(score_answer, "__func__", score_answer).__code__
    if "eval" not in code.co_names:
        raise RuntimeError(
            f"{score_answer.__module__}: its verifier reads lists in another way than that of reasoning-gym 0.1.25"
        )
    vars(sys.modules[score_answer.__module__])["eval"] = ast.literal_eval


class _Later(ModuleType):
    """A placeholder for a module: imports it when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)
