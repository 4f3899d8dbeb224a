"""A name says what is behind it: of classes, files and locals; and docstrings are sentences."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_rl"

# File name -> why several packages have one of it.
HOMONYMS: dict[str, str] = {
    "__init__": "Python's",
    "__main__": "Python's",
    **dict.fromkeys(("actor", "algorithm"), "a package's main class, and the recipe's section for it"),
    **dict.fromkeys(("convert", "evaluate", "report", "status"), "a command, and what does its work"),
    "failures": "of an agent's conversations, and of simulated machines",
    "registry": "what users name in recipes, by package",
    "reward_model": "one is trained here, and used as a reward there",
}
# Words that say nothing of what a variable is, and their greatest share, in per cent, of all locals and parameters that are
# used for more than five lines. It may only fall.
BARE = frozenset({"own", "found", "held", "given", "there", "told", "wanted", "kept", "one"})
BARE |= {"place", "places", "piece", "pieces", "part", "parts", "said", "whole", "asked"}
BARE_PER_CENT = 0.5
# First words of docstrings that are no sentences.
FRAGMENT = re.compile(r"(After|Before|Behind|By|For|From(?! here on)|Has|In|Of|On|Those|To|Under|What|With|Without)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    """By path in the package."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_no_two_public_classes_have_one_name() -> None:
    files = defaultdict(list)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(file)
    twice = {name: where for name, where in files.items() if len(where) > 1}
    assert not twice, twice


def test_files_of_one_name_have_a_reason() -> None:
    folders = defaultdict(list)
    for file in trees():
        folders[Path(file).stem].append(str(Path(file).parent))
    assert {name: where for name, where in folders.items() if len(where) > 1 and name not in HOMONYMS} == {}
    assert {name for name in HOMONYMS if len(folders[name]) < 2} == set(), "one file only: take it off the list"


def lifetimes(function: Function) -> dict[str, int]:
    """Parameters and locals of a function, and lines from the first to the last use."""
    uses = defaultdict(list)
    bound = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            bound.add(node.arg)
            uses[node.arg].append(node.lineno)
        elif isinstance(node, ast.Name):
            uses[node.id].append(node.lineno)
            if isinstance(node.ctx, ast.Store):
                bound.add(node.id)
    return {name: max(uses[name]) - min(uses[name]) for name in bound}


def long_lived() -> list[tuple[str, str]]:
    """File and name of every local that is used for more than five lines."""
    return [
        (f"{file}:{node.lineno}", name)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
        for name, lines in lifetimes(node).items()
        if lines > 5
    ]


def test_locals_that_live_long_are_no_bare_words() -> None:
    names = long_lived()
    bare = [f"{where} {name}" for where, name in names if name in BARE]
    share = 100 * len(bare) / len(names)
    assert share <= BARE_PER_CENT, f"{share:.2f} %: {bare}"


def test_docstrings_are_sentences() -> None:
    fragments = list[str]()
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, Function | ast.ClassDef):
                continue  # a module's is a title
            if FRAGMENT.match(ast.get_docstring(node) or ""):
                fragments.append(f"{file}:{node.lineno}")
    assert not fragments, fragments
