"""The documentation site: every page is in its navigation, formulas become MathML, and nothing is asked of another host."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from tools.docs_site import expanded, named, pages_in, with_mathml

ROOT = Path(__file__).resolve().parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = [str(path.relative_to(ROOT)) for path in pages_in(ROOT)]


def test_every_page_is_in_the_navigation_once() -> None:
    assert len(PAGES) > 80
    assert Counter(named(expanded(CONFIG["nav"], PAGES))) == Counter(PAGES)


def test_a_pattern_stands_for_what_nothing_else_names() -> None:
    nav = ["a/one.md", {"More": ["a/*.md", {"Last": "b.md"}]}]
    assert expanded(nav, ["b.md", "a/two.md", "a/one.md"]) == ["a/one.md", {"More": ["a/two.md", {"Last": "b.md"}]}]


def test_a_page_needs_no_other_host() -> None:
    assert {"search", "offline"} <= set(CONFIG["plugins"])
    (script,) = CONFIG["extra"]["polyfills"]
    assert "iframe-worker" in script, "the plugin would ask for its own"
    assert all((ROOT / name).is_file() for name in (script, *CONFIG["extra_css"]))
    assert CONFIG["theme"]["font"] is False


def test_formulas_become_mathml() -> None:
    def convert(latex: str, display: str) -> str:
        if "wrong" in latex:
            raise KeyError(latex)
        return f"<math {display}>{latex}</math>"

    page = (
        r'<p>x <span class="arithmatex">\(a &lt; b\)</span> <code>$c$</code></p><div class="arithmatex">\['
        "\nd\n"
        r"\]</div>"
    )
    assert with_mathml(page, convert, "p.md") == (
        '<p>x <span class="arithmatex"><math inline>a < b</math></span> <code>$c$</code></p>'
        '<div class="arithmatex"><math block>d</math></div>'
    )
    with pytest.raises(ValueError, match=r"p\.md: no formula: wrong"):
        with_mathml(r'<span class="arithmatex">\(wrong\)</span>', convert, "p.md")


def test_the_index_names_every_page_and_the_readme_is_short() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 1000
