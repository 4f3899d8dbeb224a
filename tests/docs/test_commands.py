"""The blocks of commands that `make check-docs` runs: found, and less what their comments leave out."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.commands import COMMANDS, load
from tools.check_docs import PAGES, Block, blocks, copy, run

ROOT = Path(__file__).resolve().parents[2]
TEXT = """\
```bash
first
```
<!-- not run: a cluster -->
```bash
second
```
```
output
```

<!-- not run: `make b`, `make c`: a GPU -->

```bash
make a
make b \\
    more
make d
make c
```
"""


def test_a_comment_leaves_out_a_block_or_some_of_its_lines() -> None:
    found = [(block.line, block.code, block.left_out) for block in blocks("p.md", TEXT)]
    assert found == [
        (2, "first\n", ""),
        (6, "", "a cluster"),
        (15, "make a\nmake d\n", "`make b`, `make c`: a GPU"),
    ]


def test_a_comment_about_a_line_that_is_gone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"p\.md:15: no line begins with 'make c'"):
        list(blocks("p.md", TEXT.replace("make c\n", "make e\n")))


@pytest.mark.skipif(
    not ((ROOT / ".venv" / ".installed").exists() and (ROOT / ".uv" / "bin" / "uv").exists()),
    reason="the environment was not made by make setup",
)
def test_make_in_the_copy_sets_nothing_up_and_takes_no_argument_of_an_outer_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(tmp_path)
    for name, value in {"MAKEFLAGS": " -- ARGS=README.md", "MAKELEVEL": "1", "ARGS": "README.md"}.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "log.txt"
    assert run(Block("p.md", 1, "make --dry-run train\n"), tmp_path, log)[0] == 0
    assert log.read_text().split("\n")[3:] == [".venv/bin/megatron-rl train recipes/cpu/quickstart.yaml ", ""]


@pytest.mark.parametrize("page", [*PAGES, "docs/tutorial-32b.md"])
def test_commands_and_recipes_of_the_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "".join(match[1] for match in re.finditer(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert list(blocks(page, text)) or not code
    assert set(re.findall(r"^megatron-rl ([\w-]+)", code, re.MULTILINE)) <= set(COMMANDS)
    for recipe in set(re.findall(r"recipes/(?!mine|my)[\w./-]+\.yaml", code)):
        assert (ROOT / recipe).is_file(), recipe


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)


def shown_options(text: str) -> Iterator[tuple[str, str]]:
    """Command and option of each command line of a page, in a block or within a sentence, comments behind it included."""
    for line in re.findall(r"(?:megatron-rl|mrl-launch) ([a-z-]+(?: [^`\n]*)?)", text.replace("\\\n", " ")):
        command, _, rest = line.partition(" ")
        if command in COMMANDS:
            yield from ((command, option) for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", rest))


def test_options_of_the_pages_exist() -> None:
    files = subprocess.run(["git", "ls-files", "*.md", "*.yaml"], cwd=ROOT, check=True, capture_output=True, text=True)
    shown = {
        (page, *one)
        for page in files.stdout.split()
        if page != "CHANGELOG.md"
        for one in shown_options((ROOT / page).read_text(encoding="utf-8"))
    }
    assert len(shown) > 40
    known = {}
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        load(command).add_arguments(parser, command)
        known[command] = {*options(parser)}
    assert {one for one in shown if one[2] not in known[one[1]]} == set()
