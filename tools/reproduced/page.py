"""A page of results: Markdown text, and a figure beside it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGES = ("awpo", "dgpo", "gdpo", "shrinkage")  # modules beside this one, each with `make() -> Page`


@dataclass
class Page:
    """One paper's results."""

    title: str  # the heading
    blocks: list[str]  # paragraphs and tables, in order
    draw: Callable[[Figure], None]  # draws the figure into a matplotlib figure
    size: tuple[float, float]  # of the figure, in inches

    def text(self, name: str) -> str:
        """The page, saying how it was made."""
        made = f"Made by `python tools/reproduce.py {name}`."
        return "\n\n".join([f"# {self.title}", made, *self.blocks, f"![{self.title}]({name}.png)"]) + "\n"


def make_page(name: str) -> Page:
    if name not in PAGES:
        raise ValueError(f"no page {name!r}; there are {', '.join(PAGES)}")
    page = importlib.import_module(f"reproduced.{name}").make()
    assert isinstance(page, Page)
    return page


def write_page(page: Page, name: str, folder: Path) -> None:
    """`<folder>/<name>.md` and `<folder>/<name>.png`."""
    write_figure(page.draw, page.size, folder / f"{name}.png")
    (folder / f"{name}.md").write_text(page.text(name))


def write_figure(draw: Callable[[Figure], None], size: tuple[float, float], path: Path) -> None:
    """A figure of `size` inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = pyplot.figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """First column to the left, the others to the right; floats with three decimals."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row) + " |")
    return "\n".join(lines)
