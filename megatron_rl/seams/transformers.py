"""transformers: what it does as it is imported. Written for 5.19.

It reads the files of all models to learn what each offers, twice, and in every file that says `__all__` it looks at each
line: 0.27 CPU seconds of a rank. Here it looks for the place.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

from megatron_rl.seams import check_parameters

UTILS = "transformers.utils.import_utils"
FETCH = ("fetch__all__", "file_content")


def find_names_quickly() -> None:
    """Before transformers is imported; no effect afterwards."""
    if UTILS not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def quick(fetch: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """As transformers' `fetch__all__`, which takes the names of the last line that begins with `__all__`."""

    def fetch_from_there(content: str) -> list[str]:
        return fetch(content[content.rfind("\n__all__") + 1 :])

    return fetch_from_there


class _Finder(MetaPathFinder):
    """Finds the module that has the function, once, as Python would; and exchanges the function when it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != UTILS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            _exchange_after(spec.loader)
        return spec


def _exchange_after(loader: Loader) -> None:
    load = loader.exec_module

    def load_and_exchange(module: ModuleType) -> None:
        load(module)
        name, parameters = FETCH
        fetch = getattr(module, name)
        check_parameters(fetch, parameters)
        setattr(module, name, quick(fetch))

    loader.exec_module = load_and_exchange  # type: ignore[method-assign]
