"""No import runs upward: the layers of docs/architecture.md against the imports of every file of the package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "megatron_rl").rglob("*.py"))


def layers() -> dict[str, int]:
    """Package, or module with a row of its own -> number of its row, from the top."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| package | holds |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([\w.]+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    return {name: number for number, names in enumerate(rows) for name in names}


def layer_of(module: str, known: dict[str, int]) -> int | None:
    """Of `megatron_rl.<module>`: the row with its longest name. None: of what has no row."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((known[name] for name in names if name in known), None)


def imports(node: ast.AST, types: bool = False) -> Iterator[str]:
    """Modules of the package, and names in them, that run-time code imports, also inside functions; without `megatron_rl.`.
    `types`: with those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if not types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        names = []
        if isinstance(child, ast.ImportFrom) and child.module is not None:
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        elif isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        yield from (name.partition(".")[2] for name in names if name.startswith("megatron_rl."))
        yield from imports(child, types)


def test_every_package_has_a_layer() -> None:
    known = layers()
    rooms = {path.relative_to(ROOT / "megatron_rl").parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert sorted(rooms) == sorted({name for name in known if "." not in name})


def test_no_import_runs_upward() -> None:
    known, upward = layers(), []
    for path in FILES:
        module = ".".join(path.relative_to(ROOT / "megatron_rl").with_suffix("").parts).removesuffix(".__init__")
        own = layer_of(module, known)
        for imported in imports(ast.parse(path.read_text(encoding="utf-8"))):
            layer = layer_of(imported, known)
            if own is not None and layer is not None and layer > own:
                upward.append(f"{module} imports {imported}")
    assert not upward, "\n".join(upward)


def test_packages_import_one_another_in_no_circle() -> None:
    """Counting imports inside functions, and those for type checkers."""
    graph = defaultdict(set)
    for path in FILES:
        importer = path.relative_to(ROOT / "megatron_rl").parts[0]
        for imported in imports(ast.parse(path.read_text(encoding="utf-8")), types=True):
            graph[importer] |= {imported.partition(".")[0]} - {importer}
    assert list(TopologicalSorter(graph).static_order())  # CycleError names the circle


def test_an_upward_import_would_be_found() -> None:
    known = layers()
    assert known["trainer"] > known["rewards"] > known["config"] > known["base"]
    code = "def f():\n    from megatron_rl.trainer.loop import train\n"
    assert list(imports(ast.parse(code))) == ["trainer.loop.train"]
    assert layer_of("trainer.loop.train", known) == known["trainer"]
    assert layer_of("weights.files.WeightSource", known) == known["weights"] > known["models"]
