"""What a recipe says of itself: its header, bases, data and place in the index; and sweeps of their lines."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .shipped import ELSEWHERE, RECIPES, ROOT, base_trees, checked, header, leaves, loaded, nodes, own_tree, runnable

pytestmark = pytest.mark.usefixtures("site")


@pytest.mark.parametrize("name", runnable())
def test_a_header_says_where_the_recipe_comes_from_and_how_to_start_it(name: str) -> None:
    fields = header(name)
    assert {"Reproduces", "Expected", "Hardware", "Model", "Data", "Train"} <= fields.keys()
    if not fields["Reproduces"].startswith("nothing"):
        assert re.search(r"Tables? \d|Figure \d", fields["Reproduces"]), fields["Reproduces"]
        assert "Differs" in fields
    count = nodes(name)
    assert fields["Train"].startswith(f"slurm/submit.sh --nodes={count} train recipes/{name}"), fields["Train"]
    for other in re.findall(r"(?<![\w/.-])[\w.-]+\.(?:yaml|sweep)", " ".join(fields.values())):
        assert (RECIPES / name).parent.joinpath(other).exists(), f"{name} names {other}, which is not beside it"
    tree = own_tree(name)
    assert tree["run_dir"] == f"runs/{name.removesuffix('.yaml')}"


@pytest.mark.parametrize(
    "name", sorted(str(p.relative_to(RECIPES)) for p in RECIPES.rglob("*.yaml") if p.parts[-2] not in ELSEWHERE)
)
def test_no_recipe_repeats_what_its_base_says(name: str) -> None:
    below: dict[str, Any] = {}
    for tree in base_trees(name):
        below |= dict(leaves(tree))
    repeated = [key for key, value in leaves(own_tree(name)) if key in below and below[key] == value]
    assert repeated == []


@pytest.mark.parametrize("name", runnable())
def test_a_header_prepares_the_data_and_the_model_that_the_recipe_reads(name: str) -> None:
    fields = header(name)
    folder = str(loaded(name).model.path).rpartition("/")[2]
    model = (
        fields["Model"] if not fields["Model"].startswith("as ") else header(sibling(name, fields["Model"]))["Model"]
    )
    assert re.fullmatch(rf"hf download [\w-]+/{re.escape(folder)} --local-dir \$MODELS/{re.escape(folder)}", model)
    config = loaded(name)
    tasks = [*config.tasks.train.values(), *config.tasks.eval.values()]
    read = {Path(task.path).parent.name for task in tasks if task.path is not None}
    if read:
        assert fields["Data"].startswith("recipes/prepare.sh ")
        assert set(fields["Data"].split()[1:]) == read
    else:
        assert fields["Data"].startswith("made by ")


@pytest.mark.parametrize("name", runnable())
def test_the_evaluation_that_a_header_names_exists(name: str) -> None:
    if "Evaluate" not in header(name):
        return
    run = re.escape(own_tree(name)["run_dir"])
    match = re.fullmatch(rf"megatron-rl evaluate (\S+) --model {run}/export", header(name)["Evaluate"])
    assert match
    assert (ROOT / match[1]).is_file()


def test_the_index_has_every_recipe_and_sweep_with_its_nodes() -> None:
    lines = (RECIPES / "README.md").read_text("utf-8").splitlines()
    links = {link: line for line in lines for link in re.findall(r"\]\(([\w./-]+\.(?:yaml|sweep))\)", line)}
    linked = {link: line for link, line in links.items() if Path(link).parts[0] not in ELSEWHERE}
    sweeps = (path.relative_to(RECIPES) for path in RECIPES.rglob("*.sweep"))
    assert linked.keys() == {*runnable(), *(str(path) for path in sweeps if path.parts[0] not in ELSEWHERE)}
    for name in runnable():
        assert linked[name].endswith(f"| {nodes(name)} |"), linked[name]


def sibling(name: str, text: str) -> str:
    return str(Path(name).parent / text.split()[1])


def test_prepare_makes_every_file_that_recipes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `echo` in Python's place: which commands it would run; and with a curl that asks no network."""
    names = {
        word for name in runnable() for word in header(name)["Data"].split()[1:] if "prepare.sh" in header(name)["Data"]
    }
    curl = tmp_path / "bin" / "curl"
    curl.parent.mkdir()
    curl.write_text('#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\necho fetched > "$2"\n')
    curl.chmod(0o755)
    environment = {
        **os.environ,
        "DATA": str(tmp_path / "data"),
        "PYTHON": "echo",
        "PATH": f"{curl.parent}:{os.environ['PATH']}",
    }
    result = subprocess.run([RECIPES / "prepare.sh", *sorted(names)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    fetched = (path for path in (tmp_path / "data").rglob("*.*") if path.is_file())
    made = {str(path) for path in fetched if path.parent.name != "source"}
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    prepare_data = importlib.import_module("prepare_data")
    parser = prepare_data._parser()
    for line in result.stdout.splitlines():
        words = line.split()
        if words[0].endswith("maze.py"):
            made |= {f"{words[1]}/train.jsonl", f"{words[1]}/test.jsonl"}
            continue
        arguments = parser.parse_args(words[1:])
        assert words[0] == "tools/prepare_data.py"
        made.add(arguments.output)
    configs = [loaded(name) for name in runnable()]
    tasks = [
        task for c in configs for task in (*c.tasks.train.values(), *c.tasks.eval.values()) if task.path is not None
    ]
    read = {str(tmp_path / "data" / Path(task.path).parent.name / Path(task.path).name) for task in tasks if task.path}
    assert made == read


def test_prepare_names_what_it_knows() -> None:
    result = subprocess.run([RECIPES / "prepare.sh", "gsm9k"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "no dataset gsm9k" in result.stderr
    assert "dapo_math_17k" in result.stderr


def test_run_folders_are_apart() -> None:
    folders = [own_tree(name)["run_dir"] for name in runnable()]
    assert len(set(folders)) == len(folders)


def sweep_lines(path: Path) -> list[list[str]]:
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    return [line.split() for line in lines if line and not line.startswith("#")]


def sweeps() -> list[tuple[str, str]]:
    """Every sweep with the recipe that its comment submits it with."""
    found = []
    for path in sorted(RECIPES.rglob("*.sweep")):
        match = re.search(rf"sweep recipes/{path.relative_to(RECIPES)} recipes/(\S+\.yaml)", path.read_text("utf-8"))
        assert match, f"{path}: the comment does not say how to submit it"
        found.append((str(path.relative_to(RECIPES)), match[1]))
    return found


@pytest.mark.parametrize(("sweep", "name"), sweeps())
def test_every_line_of_a_sweep_is_a_recipe_of_its_own(sweep: str, name: str) -> None:
    world = 1 if name.startswith("cpu/") else None
    every = [[word for word in line if not word.startswith("seed=")] for line in sweep_lines(RECIPES / sweep)]
    assert len({" ".join(line) for line in sweep_lines(RECIPES / sweep)}) == len(every)
    lines = list(map(list, dict.fromkeys(map(tuple, every))))
    resolved = [checked(name, line, world) for line in lines]
    for i, config in enumerate(resolved):
        assert config not in resolved[:i], f"{sweep}: line {i + 1} is a line before it: {lines[i]}"
