"""What files held that figures depend on, as a few letters: a figure is stale where they hold something else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

_CODE = re.compile(r"recipes/[\w/.-]+\.py")


def contents(path: Path) -> str:
    """Returns what of a file can change a run: without comments, of a recipe its bases too."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        recipe = yaml.safe_load(text)
        return json.dumps(recipe, sort_keys=True) + "".join(map(contents, _bases(path)))
    return "\n".join(line for line in text.splitlines() if line and not line.startswith("#"))


def digest(files: Sequence[Path]) -> str:
    return hashlib.sha256("\0".join(map(contents, files)).encode()).hexdigest()[:12]


def files_behind(root: Path, recipe: Path, *others: Path) -> list[str]:
    """A recipe and others that go with it, and all code that they and the recipe's bases name; relative to `root`."""
    code = {name for path in (recipe, *others) for name in _CODE.findall(contents(path))}
    return [*(str(path.relative_to(root)) for path in (recipe, *others)), *sorted(code)]


def _bases(recipe: Path) -> list[Path]:
    bases = yaml.safe_load(recipe.read_text(encoding="utf-8")).get("base", [])
    return [recipe.parent / file for file in ([bases] if isinstance(bases, str) else bases)]
