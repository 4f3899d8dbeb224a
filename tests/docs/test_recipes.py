"""The key tables of docs/recipes.md are those of the schema, and the recipes shown in the docs load."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.rewards.registry import list_rewards
from megatron_rl.tasks.sources import SOURCES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "document_recipes.py"
    spec = importlib.util.spec_from_file_location("document_recipes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_key_tables_are_those_of_the_schema(tool: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert tool.write(page) == page, "run `python tools/document_recipes.py`"
    assert all(f"`{name}`" in page for name in (*list_rewards(), *SOURCES))
    assert not re.search("<(files|generators|rewards)>", page)
    assert "| `steps` | `100` | RL steps |" in page
    assert "| `dtype` | `bfloat16` | `float32`, `bfloat16`: " in page


def test_every_section_has_a_table(tool: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"no heading with a key table for rollout$"):
        tool.write(page.replace("## `rollout`\n", "## `watchdog`\n"))
    with pytest.raises(ValueError, match="names no section"):
        tool.write(page.replace("## `rollout`\n", "## `rolout`\n"))


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
