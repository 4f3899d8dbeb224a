"""Writes the key tables of docs/recipes.md from the schema.

    python tools/document_recipes.py

The page's own words stay: a table is replaced where it stands, under the heading that names its section.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.agents.registry import list_agents
from megatron_rl.base.typed_params import fields, unwrap
from megatron_rl.config import Config
from megatron_rl.config.keys import choices, entry_type, meaning
from megatron_rl.rewards.registry import list_rewards
from megatron_rl.tasks.sources import SOURCES

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
REGISTRIES = {
    "<files>": [name for name, source in SOURCES.items() if not source.generates],
    "<generators>": [name for name, source in SOURCES.items() if source.generates],
    "<rewards>": list_rewards(),
    "<agents>": list_agents(),
}
TABLE = re.compile(r"\| key \| default \| meaning \|\n(?:\|.*\n)+")


def sections(section: type = Config, path: str = "") -> Iterator[tuple[str, type]]:
    """(dotted path, dataclass) of every section, `<name>` for the entries of a mapping."""
    yield path, section
    for name, hint in fields(section).items():
        inner = unwrap(hint)[0]
        entry = entry_type(inner)
        item = typing.get_args(inner)[0] if typing.get_origin(inner) is list else None
        where = f"{path}.{name}" if path else name
        for found, suffix in ((inner, ""), (entry, ".<name>"), (item, "")):
            if isinstance(found, type) and dataclasses.is_dataclass(found):
                yield from sections(found, where + suffix)


def default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def shown(value: Any) -> str:
    """A default as YAML writes it."""
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{name}: {item}' for name, item in value.items())}}}`"
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return f"`{value:.1e}`".replace("e-0", "e-")
    if isinstance(value, str) and re.fullmatch(r"[\w.-]+", value):
        return f"`{value}`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def table(section: type) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(section):
        hint, optional = unwrap(fields(section)[field.name])
        is_section = dataclasses.is_dataclass(hint) or dataclasses.is_dataclass(entry_type(hint))
        listed = typing.get_origin(hint) is list and dataclasses.is_dataclass(typing.get_args(hint)[0])
        if (is_section and not optional) or listed:
            continue
        words = ", ".join(f"`{each}`" for each in choices(fields(section)[field.name]))
        cell = ": ".join(filter(None, (words, meaning(field))))
        for placeholder, names in REGISTRIES.items():
            cell = cell.replace(placeholder, ", ".join(f"`{name}`" for name in names))
        rows.append(f"| `{field.name}` | {shown(default(field))} | {cell} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


def write(page: str) -> str:
    """The page with its tables as the schema says.

    Raises:
        ValueError: a section of the schema has no heading with a table, or a table's heading names none.
    """
    known, described = dict(sections()), set()
    parts = re.split(r"(?m)^(?=## )", page)
    for index, part in enumerate(parts):
        if not TABLE.search(part):
            continue
        heading = part.partition("\n")[0]
        paths = [""] if heading == "## Top level" else re.findall(r"`([^`]+)`", heading)
        if not paths or any(path not in known for path in paths) or len({known[path] for path in paths}) > 1:
            raise ValueError(f"docs/recipes.md: {heading!r} has a key table and names no section, or different ones")
        described |= {*paths}
        parts[index] = TABLE.sub(lambda _, path=paths[0]: table(known[path]), part)
    missing = [path for path, section in known.items() if table(section).count("\n") > 2 and path not in described]
    if missing:
        raise ValueError(f"docs/recipes.md: no heading with a key table for {', '.join(missing)}")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
