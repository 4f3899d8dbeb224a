"""What MkDocs does for the site besides its own: `hooks` in mkdocs.yml, used by `make docs`.

Formulas become MathML when the site is built, so that pages opened from a folder need no script from elsewhere; and an entry
of the navigation with a `*` stands for the pages that it matches and nothing else names.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    folder = Path(config["docs_dir"])
    pages = [str(path.relative_to(folder)) for path in pages_in(folder)]
    config["nav"] = expanded(config["nav"], pages)
    return config


def on_page_content(html: str, page: Any, **_: object) -> str:
    from latex2mathml.converter import convert

    return with_mathml(html, convert, page.file.src_uri)


def pages_in(folder: Path) -> list[Path]:
    """The Markdown files of the documentation."""
    found = [folder / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    for part in ("docs", "recipes"):
        found += sorted((folder / part).rglob("*.md"))
    return found


def named(nav: Iterable[Any]) -> Iterator[str]:
    """The pages, and patterns, of a navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            (value,) = entry.values()
            yield from [value] if isinstance(value, str) else named(value)


def expanded(nav: list[Any], pages: Iterable[str]) -> list[Any]:
    """The navigation with every pattern replaced by the pages that it matches and that nothing else names."""
    left = sorted(set(pages) - set(named(nav)))

    def each(entries: list[Any]) -> Iterator[Any]:
        for entry in entries:
            if isinstance(entry, str):
                yield from (page for page in left if PurePath(page).match(entry)) if "*" in entry else [entry]
            else:
                ((title, value),) = entry.items()
                yield {title: value if isinstance(value, str) else list(each(value))}

    return list(each(nav))


def with_mathml(page: str, convert: Callable[..., str], name: str) -> str:
    """A page's HTML with `convert`'s MathML in place of LaTeX.

    Raises:
        ValueError: a formula that cannot be converted; names it.
    """

    def mathml(match: re.Match[str]) -> str:
        latex = html.unescape(match[3]).strip()
        try:
            value = convert(latex, display="block" if match[2] == "[" else "inline")
        except Exception as error:
            raise ValueError(f"{name}: no formula: {latex}: {error!r}") from error
        return f'<{match[1]} class="arithmatex">{value}</{match[1]}>'

    return _FORMULA.sub(mathml, page)
