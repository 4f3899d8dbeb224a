"""docs/recipes.md has every key of the schema with its default, and the recipes shown in the docs load."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from omegaconf import MISSING

from megatron_rl.config import load_recipe
from megatron_rl.config.schema import Config
from megatron_rl.config.shape import entry_type, fields, unwrap

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"


def sections(cls: type = Config, path: str = "") -> Iterator[tuple[str, type]]:
    """(dotted path, dataclass) of every section, `<name>` for the entries of a mapping."""
    yield path, cls
    for name, hint in fields(cls).items():
        hint, inner = unwrap(hint)[0], f"{path}.{name}" if path else name
        item = entry_type(hint)
        if getattr(hint, "__origin__", None) is list and dataclasses.is_dataclass(hint.__args__[0]):
            hint = hint.__args__[0]
        if dataclasses.is_dataclass(hint):
            yield from sections(cast(type, hint), inner)
        elif dataclasses.is_dataclass(item):
            yield from sections(item, f"{inner}.<name>")


def tables() -> dict[str, dict[str, Any]]:
    """Section path -> key -> documented default, MISSING for `required`."""
    found: dict[str, dict[str, Any]] = {}
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        rows = re.findall(r"^\| `([a-z0-9_]+)` \| (.+?) \|", body, re.MULTILINE)
        table = {key: MISSING if cell == "required" else yaml.safe_load(cell.strip("`")) for key, cell in rows}
        for path in [""] if heading == "Top level" else re.findall(r"`([^`]+)`", heading):
            found[path] = table
    return found


def leaves(cls: type) -> dict[str, Any]:
    """Key -> default of the keys that hold a value; a section that may be null is one of them."""
    nested = {path.split(".")[0] for path, _ in sections(cls)}
    return {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in dataclasses.fields(cls)
        if field.name not in nested or unwrap(fields(cls)[field.name])[1]
    }


@pytest.mark.parametrize(("path", "cls"), list(sections()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_key_is_documented_with_its_default(path: str, cls: type) -> None:
    assert tables().get(path, {}) == leaves(cls)


@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md"])
def test_recipes_shown_load(page: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    blocks = re.findall(r"```yaml\n(# recipes/.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        path = tmp_path / block.splitlines()[0].removeprefix("# ").strip()
        path.write_text(block)
        assert load_recipe(path).run_dir.startswith("runs/")


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
