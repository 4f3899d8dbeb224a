"""A recipe in the making: what is set, what is said beside it, what of the other configuration was used."""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.base.plugins import require_regular
from megatron_rl.config import elsewhere
from megatron_rl.migrate.read import Flat


@dataclass
class Draft:
    """The other configuration, and the recipe as far as it is.

    Attributes:
        framework: `verl`, `nemo` or `trl`.
        flat: their keys.
        prompts: how many training prompts there are; None where nobody knows.
        recipe: ours, nested.
        remarks: what to know of a section of the recipe, by its name.
        used: their keys that were read.
    """

    framework: str
    flat: Flat
    prompts: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def take(self, *names: str) -> Any:
        """The value of the first of their keys that is set; None where none is. All count as used."""
        self.used |= {name for name in names if name in self.flat}
        return next((self.flat[name] for name in names if self.flat.get(name) is not None), None)

    def number(self, *names: str) -> float | None:
        """The same of a number; what is none (`auto`, an unresolved variable) is remarked upon."""
        value = self.take(*names)
        number = finite(value)
        if number is None and isinstance(value, str | float):
            self.remark("", f"{names[0]}: {value} is no number; set its counterpart by hand")
        return number

    def count(self, *names: str) -> int | None:
        value = self.number(*names)
        return None if value is None else int(value)

    def put(self, key: str, value: object, remark: str = "") -> None:
        """Sets a key of ours, unless the value is None."""
        if value is None:
            return
        *sections, name = key.split(".")
        tree = self.recipe
        for section in sections:
            tree = tree.setdefault(section, {})
        tree[name] = _with_environment(value)
        if remark:
            self.remark(sections[0] if sections else name, f"{key}: {remark}")

    def get(self, key: str) -> Any:
        value: Any = self.recipe
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def remark(self, section: str, text: str) -> None:
        """A comment above a section of the recipe; at its head where the section is empty."""
        self.remarks.setdefault(section, []).append(text)

    def same(self) -> None:
        """Takes over every key whose value is the same here (`elsewhere.yaml`)."""
        for row in elsewhere.rows():
            if not row.same:
                continue
            value = finite(self.take(*getattr(row, self.framework)))
            if value is not None and value >= 0:
                self.put(row.here[0], value)

    def left(self) -> list[tuple[str, object, str]]:
        """Their keys that were not read: name, value, and why there is no counterpart, where the table says."""
        found = []
        for name, value in self.flat.items():
            if name not in self.used and value not in (None, {}, []) and not name.endswith("_target_"):
                row = elsewhere.row_of(self.framework, name)
                found.append((name, value, row.says if row is not None and not row.here else ""))
        return found


def _with_environment(value: Any) -> Any:
    """Variables that a launch script does not set itself are the environment's, in a recipe's words."""
    if isinstance(value, dict):
        return {name: _with_environment(item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    text = re.sub(r"\$(?:\{(\w+)[^}]*\}|(\w+))", lambda found: f"${{oc.env:{found[1] or found[2]}}}", value)
    return re.sub(r"\$\{(?!oc\.env:\w+\})", r"\\${", text)


def finite(value: object) -> float | None:
    """A finite number, or that of a text; None for all else."""
    with contextlib.suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < math.inf else None


def rows_of(files: list[str]) -> int | None:
    """How many rows local data files have: lines of JSON Lines, rows of Parquet where pyarrow is here. None: not known."""
    with contextlib.suppress(ModuleNotFoundError, OSError, ValueError):
        return sum(map(_rows, files))
    return None


def _rows(name: str) -> int:
    path = os.path.expanduser(name)
    require_regular(path)
    if name.endswith(".jsonl"):
        with open(path, "rb") as file:
            return sum(1 for line in file if line.strip())
    if name.endswith(".parquet"):
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    raise ValueError(f"{name} is neither JSON Lines nor Parquet")
