"""A model folder's own Python files are never run: not by saying nothing, since transformers then asks the terminal."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN_CLASS = {"megatron_rl/images.py"}  # a class by name, which imports nothing else


@pytest.mark.parametrize("package", ["megatron_rl", "tools", "benchmarks"])
def test_every_loading_call_says_no_to_remote_code(package: str) -> None:
    silent, seen = [], 0
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in ("from_pretrained", "from_config", "pipeline"):
                continue
            seen += 1
            said = {key.arg: key.value for key in node.keywords}.get("trust_remote_code")
            place = path.relative_to(ROOT).as_posix()
            if place not in OWN_CLASS and not (isinstance(said, ast.Constant) and said.value is False):
                silent.append(f"{place}:{node.lineno}")
    assert not silent
    assert seen or package == "tools"
