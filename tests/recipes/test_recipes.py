"""Every recipe of recipes/ as a user on a login node meets it: real shapes, no weights, no GPU, no download."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.config import Config, ConfigError, Machine, check, load_recipe
from megatron_rl.config.checks import smallest_world
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.published import FOLDER, published_config, published_names
from megatron_rl.models import model_of
from megatron_rl.planning.components import CHECK, GENERATE, GIB, PHASES, SYNC, UPDATE, MemoryPlan
from megatron_rl.planning.memory import make_plan
from megatron_rl.weights.create import write_tokenizer
from tests.agents import talking

from . import tiny

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CARDS = {"H100 (80 GB)": 79, "H200 (141 GB)": 139}  # GiB that the driver reports
ELSEWHERE = ("cpu", "eval")  # folders with tests of their own


def runnable() -> list[str]:
    """Recipes that can be started: not bases, whose file or folder begins with an underscore."""
    paths = (path.relative_to(RECIPES) for path in RECIPES.rglob("*.yaml"))
    return sorted(
        str(path) for path in paths if path.parts[0] not in ELSEWHERE and "_" not in {p[0] for p in path.parts}
    )


def sweep_lines(path: Path) -> list[list[str]]:
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    return [line.split() for line in lines if line and not line.startswith("#")]


def header(name: str) -> dict[str, str]:
    """The comment at the top: `# Key: text`, continued by lines that are indented."""
    fields: dict[str, str] = {}
    key = ""
    for line in (RECIPES / name).read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        if match := re.match(r"# ([A-Z][a-z]+): (.*)", line):
            key = match[1]
            fields[key] = match[2]
        elif key:
            assert line.startswith("#   "), f"{name}: {line!r} belongs to no field of the header"
            fields[key] += " " + line[4:]
    return fields


def hardware(name: str) -> tuple[int, int]:
    """Nodes of 8 GPUs, and GiB of each GPU."""
    match = re.match(r"(\d+) nodes? x 8 (H\d+ \(\d+ GB\))", header(name)["Hardware"])
    assert match, f"{name}: the header's Hardware does not say how many nodes of which GPUs"
    return int(match[1]), CARDS[match[2]]


def nodes(name: str) -> int:
    return hardware(name)[0]


@pytest.fixture(autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, places: tuple[Path, Path]) -> None:
    models, data = places
    monkeypatch.setenv("MODELS", str(models))
    monkeypatch.setenv("DATA", str(data))
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of models, with the real config.json and empty weights, and of data, with a row in each format."""
    models, data = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("data")
    words = tmp_path_factory.mktemp("words")  # of agents' models, whose templates are looked at
    write_tokenizer(words, CreateModelConfig(characters=talking.CHARACTERS, vocab_size=64))
    (words / "chat_template.jinja").write_text(talking.TEMPLATE)
    for model in published_names():
        folder = models / model
        shutil.copytree(words, folder)
        (folder / "config.json").write_text(json.dumps(published_config(model)))
        (folder / "model.safetensors").touch()
    for name in runnable():
        for task in tasks_of(name):
            if "path" in task:
                assert task["source"] in ("jsonl", "parquet"), f"{name}: {task}"
                path = Path(task["path"].replace("${oc.env:DATA,data}", str(data)))
                tiny.save_rows(path, [tiny.kind(path)[0]])
    return models, data


def tasks_of(name: str) -> Iterator[dict[str, Any]]:
    for tree in (*base_trees(name), own_tree(name)):
        for split in ("train", "eval"):
            yield from (task for task in tree.get("tasks", {}).get(split, {}).values() if task)


# ------------------------------------------------------------------------------------------------------------- trees
def own_tree(name: str) -> dict[str, Any]:
    tree = yaml.safe_load((RECIPES / name).read_text("utf-8"))
    tree.pop("base", None)
    return dict(tree)


def base_trees(name: str) -> list[dict[str, Any]]:
    """The trees of all bases, lowest first."""
    bases = yaml.safe_load((RECIPES / name).read_text("utf-8")).get("base", [])
    trees: list[dict[str, Any]] = []
    for base in [bases] if isinstance(bases, str) else bases:
        inner = str((RECIPES / name).parent.joinpath(base).resolve().relative_to(RECIPES))
        trees += [*base_trees(inner), own_tree(inner)]
    return trees


def leaves(tree: dict[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        inner = f"{key}.{name}" if key else name
        if isinstance(value, dict) and value:
            yield from leaves(value, inner)
        else:
            yield inner, value


# ------------------------------------------------------------------------------------------------------------- checks
@functools.cache
def loaded(name: str) -> Config:
    return load_recipe(RECIPES / name)


def checked(name: str, overrides: list[str] | None = None, world: int | None = None) -> Config:
    world = world or 8 * nodes(name)
    return check(
        load_recipe(RECIPES / name, overrides) if overrides else loaded(name),
        machine=Machine(gpus=8, world_size=world, local_world_size=min(8, world)),
    )


def plan(config: Config, world: int, gib: float = CARDS["H100 (80 GB)"]) -> MemoryPlan:
    assert config.model.path is not None
    model = json.loads((Path(config.model.path) / "config.json").read_text("utf-8"))
    return make_plan(config, model_of(model), world, gib * GIB)


@pytest.mark.parametrize("name", runnable())
def test_a_recipe_is_accepted_by_the_command_on_a_laptop(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", str(RECIPES / name), "--check"])
    printed = capsys.readouterr()
    assert code == 0, printed.err


@pytest.mark.parametrize("name", runnable())
def test_a_recipe_divides_and_fits_the_nodes_that_its_header_names(name: str) -> None:
    count, gib = hardware(name)
    made = plan(checked(name), 8 * count, gib)
    assert list(made.problems()) == []
    assert made.full_length_sequences >= 8


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


# ------------------------------------------------------------------------------------------------------ wrong layouts
WRONG = [
    ("scale/qwen3-235b-a22b.yaml", "actor.parallel.pipeline=64", "94 layers cannot be spread over 64 stages"),
    ("scale/qwen3-235b-a22b.yaml", "actor.parallel.virtual_pipeline=5", "94 layers do not divide over 5 model chunks"),
    ("scale/qwen3-235b-a22b.yaml", "actor.parallel.tensor=8", "key/value heads"),
    ("scale/qwen3-235b-a22b.yaml", "actor.parallel.expert=32", "must divide the 16 ranks of a pipeline stage"),
    ("scale/qwen3-30b-a3b.yaml", "actor.parallel.expert=3", "must divide"),
    ("scale/qwen3-32b.yaml", "actor.parallel.tensor=16", "key/value heads"),
    ("scale/qwen3-14b.yaml", "actor.parallel.pipeline=16", "multiple"),
    ("scale/qwen3-8b.yaml", "rollout.tensor_parallel=3", "rollout.tensor_parallel"),
    ("scale/qwen3-8b.yaml", "actor.tokens_per_microbatch=8192", "must hold the longest"),
    ("scale/qwen3-32b-64k.yaml", "model.rope_scaling=null", "65536 exceeds the model's 40960 positions"),
    ("scale/qwen3-32b-64k.yaml", "model.rope_scaling.factor=1.5", "65536 exceeds the model's 49152 positions"),
    ("scale/qwen3-30b-a3b-64k.yaml", "actor.tokens_per_microbatch=32768", "must hold the longest"),
    ("dgpo/7b.yaml", "actor.parallel.tensor=8", "attention heads"),
    ("dgpo/1.5b.yaml", "actor.parallel={tensor: 8, sequence: true}", "key/value heads"),
    ("shrinkage/math-1.5b.yaml", "rollout.max_tokens=4096", "4096 positions"),
]


@pytest.mark.parametrize(("name", "override", "message"), WRONG)
def test_a_wrong_layout_is_refused_on_the_real_shape(name: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(name, [override])


TOO_LARGE = [
    ("scale/qwen3-32b.yaml", ["actor.parallel.tensor=2"], 4, "update"),
    ("scale/qwen3-8b.yaml", ["actor.recompute=none", "actor.tokens_per_microbatch=32768"], 2, "update"),
    ("scale/qwen3-8b.yaml", ["actor.offload=false"], 1, "generate"),
    ("scale/qwen3-32b-64k.yaml", ["actor.recompute=none", "actor.parallel.context=1"], 4, "update"),
    ("scale/qwen3-30b-a3b-64k.yaml", ["actor.recompute=none"], 4, "update"),
    ("scale/qwen3-30b-a3b-64k.yaml", ["rollout.tensor_parallel=1"], 4, "KV cache"),
    ("scale/qwen3-235b-a22b.yaml", ["rollout.tensor_parallel=8", "rollout.memory_fraction=0.7"], 16, "KV cache"),
    ("scale/qwen3-235b-a22b.yaml", ["actor.parallel.pipeline=4", "actor.tokens_per_microbatch=65536"], 8, "update"),
]


@pytest.mark.parametrize(("name", "overrides", "count", "message"), TOO_LARGE)
def test_what_does_not_fit_is_said_not_to(name: str, overrides: list[str], count: int, message: str) -> None:
    problems = list(plan(checked(name, overrides, 8 * count), 8 * count).problems())
    assert any(message in problem for problem in problems), problems


# -------------------------------------------------------------------------------------------------------- the command
def test_plan_on_a_laptop_without_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELS", "/nowhere")
    recipe = str(RECIPES / "scale/qwen3-235b-a22b.yaml")
    model = ["--model-config", str(FOLDER / "Qwen3-235B-A22B.json")]
    assert main(["plan", recipe, "--nodes", "16", *model]) == 0
    printed = capsys.readouterr().out
    assert "235.09 B parameters, 22.19 B of them active per token\n" in printed
    assert "it fits" in printed.splitlines()
    assert "estimates, compared" in printed
    assert main(["plan", recipe, "--nodes", "16", "--hardware", "h100,memory_gib=40", *model]) == 1
    assert "IT DOES NOT FIT" in capsys.readouterr().out
    assert main(["plan", recipe, "actor.parallel.virtual_pipeline=5", "--nodes", "16", *model]) == 2
    assert "94 layers" in capsys.readouterr().err
    assert main(["plan", recipe, "--nodes", "16"]) == 0
    by_name = capsys.readouterr().out
    remark = "; sizes of the published Qwen3-235B-A22B, since /nowhere/Qwen3-235B-A22B does not exist\n"
    assert by_name == printed.replace("active per token\n", f"active per token{remark}")
    assert main(["plan", recipe, "--nodes", "16", "model.path=/nowhere/Qwen4"]) == 2
    assert "no published model called Qwen4; give its config.json: --model-config FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "overrides", "gpus"),
    [
        ("scale/qwen3-8b.yaml", [], 8),
        ("scale/qwen3-32b-fp8.yaml", [], 16),  # one node divides, and is too small
        ("scale/qwen3-235b-a22b.yaml", [], 128),  # 16 nodes are the fewest that divide
        ("scale/qwen3-235b-a22b.yaml", ["actor.parallel.pipeline=0"], None),
    ],
)
def test_plan_finds_the_fewest_nodes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    overrides: list[str],
    gpus: int | None,
) -> None:
    monkeypatch.setenv("MODELS", "/nowhere")
    assert main(["plan", str(RECIPES / recipe), *overrides]) == (2 if gpus is None else 0)
    printed = capsys.readouterr()
    assert f" on {gpus} GPUs; " in printed.out or "`actor.parallel.pipeline` must be at least 1" in printed.err


def test_plan_of_a_recipe_without_rewards_says_how_to_see_the_actors_part(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "cpu/preference_reward.yaml")
    assert main(["plan", recipe]) == 2
    assert "add any reward, as in rewards.any.reward=length" in capsys.readouterr().err
    assert main(["plan", recipe, "rewards.any.reward=length"]) == 0


def test_a_check_without_the_model_says_that_it_is_missing_and_checks_its_published_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELS", "/nowhere")
    recipe = str(RECIPES / "scale/qwen3-32b.yaml")
    missing = "/nowhere/Qwen3-32B does not exist; the other checks used the published sizes of Qwen3-32B"
    assert main(["train", recipe, "--check"]) == 2
    assert capsys.readouterr().err == f"megatron-rl: `model.path`: {missing}\n"
    assert main(["train", recipe, "actor.parallel.tensor=16", "--check"]) == 2
    assert re.search(f"{missing}\n.*key/value heads", capsys.readouterr().err)


def test_the_readmes_plan_runs_in_a_fresh_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)  # where one writes its page
    (tmp_path / "recipes").symlink_to(RECIPES)
    commands = re.findall(r"^megatron-rl (plan [^#\n]*)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert commands
    for command in commands:
        assert main(command.split()) == 0, capsys.readouterr().err


# Comments with a layout's figures: the recipe that they are of, and further overrides of which they speak.
FIGURES: dict[str, tuple[str, list[str]]] = {
    "_h100/2b.yaml": ("awpo/qwen3-1.7b.yaml", []),
    "_h100/4b.yaml": ("awpo/qwen3-4b-2507.yaml", []),
    "_h100/8b.yaml": ("scale/qwen3-8b.yaml", []),
    "_h100/14b.yaml": ("scale/qwen3-14b.yaml", []),
    "_h100/32b.yaml": ("scale/qwen3-32b.yaml", []),
    "_h100/30b-a3b.yaml": ("scale/qwen3-30b-a3b.yaml", []),
    "_h100/235b-a22b.yaml": (
        "scale/qwen3-235b-a22b.yaml",
        ["rollout.fp8=blockwise", "rollout.memory_fraction=0.75"],
    ),
    **{name: (name, []) for name in runnable() if name.startswith("scale/")},
}


def comment(name: str) -> str:
    lines = (RECIPES / name).read_text("utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in itertools.takewhile(lambda x: x.startswith("#"), lines))


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_in_a_layouts_comment_are_what_plan_says(name: str) -> None:
    recipe, overrides = FIGURES[name]
    made = [
        plan(checked(recipe, change, 8 * count), 8 * count, hardware(recipe)[1])
        for count in (1, 2, 4, 16, 32)
        for change in ([], overrides)
        if 8 * count % smallest_world(loaded(recipe)) == 0
    ]
    gib = {f"{part.bytes / GIB:.1f}" for one in made for part in one.components}
    gib |= {f"{one.peak(phase) / GIB:.1f}" for one in made for phase in PHASES}
    text = comment(name)
    written = set(re.findall(r"(?<![\w.=-])\d+\.\d+(?! ?B\b)(?![\w-])", text))
    if name.startswith("scale/"):
        written |= set(re.findall(r"(?<![\d.])(\d+) GiB", text))
    assert written <= gib, f"{name}: plan knows no {written - gib}"
    sequences = {f"{one.full_length_sequences:.0f}" for one in made}
    assert set(re.findall(r"(\d+) sequences", text)) <= sequences
    assert all(match in {f"{one.gpu_bytes / GIB:.0f}" for one in made} for match in re.findall(r"GiB of (\d+)", text))


def test_the_tables_in_the_layouts_page_are_what_plan_says() -> None:
    rows = re.findall(
        r"^\| \[(\S+)\]\(\S+\) \| (\d+) \|.*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$",
        (ROOT / "docs" / "layouts.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert {f"scale/{name}" for name, *_ in rows} == {name for name in runnable() if name.startswith("scale/")}
    for name, count, *written in rows:
        world = 8 * int(count)
        made = plan(checked(f"scale/{name}", world=world), world, hardware(f"scale/{name}")[1])
        found = [f"{made.peak(phase) / GIB:.1f}" for phase in (GENERATE, UPDATE, SYNC, CHECK)]
        found.append(f"{made.full_length_sequences:.0f}")
        assert written == found, f"{name} on {count} nodes"


def test_a_reward_model_reads_text_only() -> None:
    check(loaded("cpu/visual.yaml"))
    with pytest.raises(ConfigError, match="reads text only, and the model has a vision tower"):
        check(loaded("cpu/visual.yaml"), command="reward-model")


def test_a_recipe_with_processes_of_its_own_is_checked_for_another_launchers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As slurm/submit.sh checks it, which leaves `launch.processes` to Slurm."""
    recipe = str(RECIPES / "cpu" / "quickstart.yaml")
    assert main(["train", recipe, "--check", "--processes", "16"]) == 0, capsys.readouterr().err
    assert yaml.safe_load(capsys.readouterr().out)["launch"]["processes"] is None
    assert main(["train", recipe, "rollout.tensor_parallel=2", "--check", "--processes", "3"]) == 2
    assert "the number of processes (3) must be a multiple of" in capsys.readouterr().err
