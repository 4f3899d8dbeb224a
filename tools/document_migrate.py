"""Writes the table of docs/migrate.md from megatron_rl/config/elsewhere.yaml.

python tools/document_migrate.py
"""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.elsewhere import markdown

PAGE = Path(__file__).parents[1] / "docs" / "migrate.md"
MARK = "<!-- from megatron_rl/config/elsewhere.yaml: python tools/document_migrate.py -->\n"


def page(text: str) -> str:
    """The page with the table as it is now."""
    return text[: text.index(MARK) + len(MARK)] + "\n" + markdown()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
