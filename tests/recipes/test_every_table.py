"""The index of the papers' tables and figures: every one is in it once, and what it names exists."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
# Figures and tables that the papers number.
PAPERS = {"AWPO v2": (5, 6), "AWPO v1": (2, 5), "GDPO": (10, 9), "DGPO": (5, 14), "shrinkage": (15, 6)}


def rows() -> list[tuple[str, str, str]]:
    """Paper, tables or figures, and where they are."""
    section = (RECIPES / "README.md").read_text("utf-8").partition("## Every table and figure")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    paper, found = "", []
    for first, what, where in lines[2:]:
        paper = first or paper
        found.append((paper, what, where))
    return found


def test_every_table_and_figure_is_there_once() -> None:
    listed = Counter[tuple[str, str, int]]()
    for paper, what, _ in rows():
        kind, _, numbers = what.partition(" ")
        assert kind in ("Table", "Figure") or "," in numbers, what
        listed.update((paper, kind.rstrip("s"), int(number)) for number in numbers.split(","))
    counted = {
        (paper, kind, number)
        for paper, counts in PAPERS.items()
        for kind, most in zip(("Figure", "Table"), counts, strict=True)
        for number in range(1, most + 1)
    }
    assert listed.keys() == counted
    assert max(listed.values()) == 1


def test_what_the_index_names_exists() -> None:
    words = re.findall(r"`((?:awpo|gdpo|dgpo|shrinkage|eval)/[\w.]+)`", " ".join(where for _, _, where in rows()))
    files = [word for word in words if word != "shrinkage/lambda"]
    assert len(files) > 15
    for file in files:
        assert (RECIPES / file).is_file() or (RECIPES / f"{file}.yaml").is_file(), file
