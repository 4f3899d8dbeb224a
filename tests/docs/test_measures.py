"""The package stays in small pieces: lines per file and function, `try`, imports inside functions, words of docs."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.models.family import Family
from megatron_rl.rewards.tool_parsers import FORMATS

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES, FUNCTION_LINES = 400, 80
TRIES_PER_1000_LINES = 5.0
# Each for start-up (what only one command needs) or for a package that may be missing.
LATE_IMPORTS = 160
DOCS_WORDS = 50_000
REPRODUCED = {*(ROOT / "docs" / "reproduced").glob("*.md")} - {ROOT / "docs" / "reproduced" / "README.md"}
FILES_THAT_NAME_A_FAMILY = 4  # beside its own in `models`, its tests and its shapes

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[str, str]]:
    """Path and text of every file of the package."""
    for path in sorted((ROOT / "megatron_rl").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def nodes() -> Iterator[tuple[str, ast.AST]]:
    return ((file, node) for file, text in sources() for node in ast.walk(ast.parse(text)))


def late_imports(node: ast.AST, inside: bool = False) -> int:
    """How many import statements stand in functions."""
    count = int(inside and isinstance(node, ast.Import | ast.ImportFrom))
    inside = inside or isinstance(node, Function)
    return count + sum(late_imports(child, inside) for child in ast.iter_child_nodes(node))


def test_files_and_functions_are_short() -> None:
    long = [f"{file}: {text.count(chr(10))} lines" for file, text in sources() if text.count("\n") > FILE_LINES]
    for file, node in nodes():
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES:
            long.append(f"{file}:{node.lineno} {node.name}")
    for folder in ("tests", "tools", "benchmarks"):
        lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).rglob("*.py")}
        long += [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > FILE_LINES]
    assert not long, long


def test_few_errors_are_caught() -> None:
    tries = sum(isinstance(node, ast.Try) for _, node in nodes())
    lines = sum(text.count("\n") for _, text in sources())
    assert tries <= TRIES_PER_1000_LINES * lines / 1000, f"{tries} in {lines} lines: base.messages.errors_named may do"


def test_few_imports_stand_in_functions() -> None:
    by_file = {file: late_imports(ast.parse(text)) for file, text in sources()}
    most = sorted(by_file, key=lambda file: by_file[file], reverse=True)[:5]
    assert sum(by_file.values()) <= LATE_IMPORTS, f"{sum(by_file.values())}; most in {', '.join(most)}"
    assert late_imports(ast.parse("import a\ndef f():\n    import b\n    def g():\n        from c import d\n")) == 2


def test_the_docs_can_be_read() -> None:
    """Without what `tools/reproduce.py` writes: tables."""
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md") if path not in REPRODUCED)
    words = sum(any(letter.isalnum() for letter in word) for text in pages for word in text.split())
    assert words <= DOCS_WORDS, words


def test_few_files_name_a_family() -> None:
    """What is particular to a family stands in its own file; others ask its description."""
    files = {f"megatron_rl.models.{path.stem}": path.stem for path in (ROOT / "megatron_rl" / "models").glob("*.py")}
    declared = {
        family
        for module, family in files.items()
        if family not in ("registry", "__init__")
        and any(isinstance(value, Family) for value in vars(importlib.import_module(module)).values())
    }
    assert len(declared) >= 9
    for family in sorted(declared - FORMATS.keys()):  # `llama`, say, is a way to write tool calls, too
        named = re.compile(rf"(?<![a-z0-9_]){family}(?![a-z0-9_])")
        naming = [file for file, text in sources() if named.search(text) and Path(file).stem != family]
        assert len(naming) <= FILES_THAT_NAME_A_FAMILY, f"{family}: {naming}"
