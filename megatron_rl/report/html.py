"""Pieces of an HTML page: one file, nothing from elsewhere, light or dark as the reader's system is."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --ink: #0f172a; --soft: #64748b; --line: #e2e8f0; --paper: #fff; --box: #f8fafc;
  --good: #059669; --look: #d97706; --bad: #dc2626 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e8f0; --soft: #94a3b8; --line: #334155; --paper: #0f172a; --box: #1e293b;
    --good: #34d399; --look: #fbbf24; --bad: #f87171 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1240px; margin: 2rem auto; padding: 0 1.5rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line) }
.sub { color: var(--soft); margin: 0 0 .3rem }
svg { max-width: 100%; height: auto } svg text { fill: currentColor }
table { border-collapse: collapse; font-size: .9rem }
td, th { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top }
th { color: var(--soft); font-weight: 600 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td.n:last-child, th.n:last-child { padding-right: 0 }
@media (max-width: 500px) { body { margin: 1rem auto; padding: 0 .8rem }
  table { font-size: .78rem } td, th { padding-right: .5rem } }
tr + tr td { border-top: 1px solid var(--line) }
.good { color: var(--good) }
.look { color: var(--look) }
.bad { color: var(--bad) }
pre { background: var(--box); padding: .7rem; margin: .2rem 0; font-size: .8rem;
  white-space: pre-wrap; overflow-wrap: anywhere }
details { margin: .6rem 0 }
summary { cursor: pointer; font-weight: 600 }
"""


def document(title: str, style: str, parts: Iterable[str]) -> str:
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{text(title)}</title>'
        f"<style>{_STYLE}{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    return page.encode(errors="backslashreplace").decode()  # models and file names may give half a surrogate pair


def section(title: str, parts: Sequence[str]) -> list[str]:
    return [f"<h2>{text(title)}</h2>", *parts] if any(parts) else []


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """`numbers`: how many of the last columns are numbers."""
    kinds = ["" if i < len(head) - numbers else ' class="n"' for i in range(len(head))]
    top = "".join(f"<th{kind}>{text(cell)}</th>" for cell, kind in zip(head, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{text(cell) if kind else _names(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _names(value: str) -> str:
    """Text that may be broken within names, after a slash or an underscore."""
    return re.sub("([/_])", r"\1<wbr>", text(value))


def text(value: str) -> str:
    return html.escape(value)


def script_data(name: str, data: str) -> str:
    """JSON for the page's scripts to read, as the element `name`."""
    escaped = data.replace("<", "\\u003c")  # only `<` could end a script's text
    return f'<script type="application/json" id="{name}">{escaped}</script>'
