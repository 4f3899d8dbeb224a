"""A table of figures says where they come from: the command that prints them, or the day or commit of their measurement; and
figures of a recipe are of the recipe as it is.

`<!-- figures of FILE FILE: 0123456789ab -->` on a page names the files that a run depends on, relative to the repository, and
what they held when the figures were made.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_OF_FILES = re.compile(r"<!-- figures of ([^:]+): (\w+) -->")
_NUMBER = re.compile(r"[~<≈−+-]?[\d.,]+\s*(%|s|ms|[KMG]i?B|×)?( \(.*\))?")
_SOURCE = re.compile(
    r"20\d\d-\d\d-\d\d|\d+ November|commit|`[^`]*(python |megatron-rl |tools/|benchmarks|tests/)[^`]*`"
)
# Worked examples, which can be done in the head.
EXAMPLES = {"rewards/api_bank.md", "rewards/tool_correctness.md"}


def sections(text: str) -> list[str]:
    """A page cut at its headings; blocks of code as one piece of code each."""

    def inline(block: re.Match[str]) -> str:
        return "`" + re.sub("[`#\n]", " ", block[0]) + "`"

    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    return re.split(r"^(?=#{1,3} )", code.sub(inline, text), flags=re.MULTILINE)


def tables(section: str) -> Iterator[list[str]]:
    """The cells of each table but for its header and first column."""
    for found in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
        rows = [line.strip().strip("|").split("|") for line in found.strip().splitlines()]
        yield [cell.strip() for row in rows[2:] for cell in row[1:]]


def without_source(text: str) -> list[str]:
    """The headings of sections with a table of figures, where neither they nor the page's head say where those are from."""
    head, *_ = [part for part in sections(text) if part.strip()]
    found = []
    for section in sections(text):
        for cells in tables(section):
            numbers = sum(_NUMBER.fullmatch(cell) is not None for cell in cells)
            if numbers >= 4 and numbers >= 0.3 * len(cells) and not _SOURCE.search(section + head):
                found.append(section.splitlines()[0])
    return found


@pytest.mark.parametrize("page", sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")))
def test_tables_of_figures_name_their_command_or_day(page: str) -> None:
    if page not in EXAMPLES:
        assert without_source((DOCS / page).read_text(encoding="utf-8")) == []


def test_a_table_without_a_source_is_found() -> None:
    table = "| a | s | s |\n|---|---|---|\n| x | 1.5 | 2 |\n| y | 3 ms | 4 % |\n"
    page = f"# Page\n\nText.\n\n## Speed\n\n{table}"
    assert without_source(page) == ["## Speed"]
    assert without_source(page.replace("Text.", "`python -m benchmarks.step`.")) == []
    assert without_source(page + "\n2026-11-23\n") == []
    assert without_source(page.replace("| 1.5 | 2 |", "| one | two |").replace("| 3 ms | 4 % |", "| a | b |")) == []


def contents(path: Path) -> str:
    """Returns what of a file can change a run: without comments, of a recipe its bases too."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        recipe = yaml.safe_load(text)
        bases = recipe.get("base", [])
        files = [bases] if isinstance(bases, str) else bases
        return json.dumps(recipe, sort_keys=True) + "".join(contents(path.parent / file) for file in files)
    return "\n".join(line for line in text.splitlines() if line and not line.startswith("#"))


def digest(files: Sequence[Path]) -> str:
    return hashlib.sha256("\0".join(map(contents, files)).encode()).hexdigest()[:12]


@pytest.mark.parametrize("page", sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")))
def test_figures_are_of_the_recipe_as_it_is(page: str) -> None:
    for names, then in _OF_FILES.findall((DOCS / page).read_text(encoding="utf-8")):
        now = digest([ROOT / name for name in names.split()])
        assert now == then, f"{names} changed since {page} was written: make its figures anew, and write {now}"


def test_comments_change_no_figure_and_a_base_does(tmp_path: Path) -> None:
    recipe, base, sweep = (tmp_path / name for name in ("a.yaml", "_b.yaml", "c.sweep"))
    recipe.write_text("base: _b.yaml\nseed: 1\n")
    base.write_text("trainer: {steps: 3}\n")
    sweep.write_text("seed=1\n")
    before = digest([recipe, sweep])
    recipe.write_text("# why\nbase: _b.yaml\nseed: 1  # so\n")
    sweep.write_text("# why\nseed=1\n")
    assert digest([recipe, sweep]) == before
    base.write_text("trainer: {steps: 4}\n")
    assert digest([recipe, sweep]) != before
