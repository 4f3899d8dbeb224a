"""Every layout on the real shape of its model: that it divides and fits, what its comments say of it, and which do not."""

from __future__ import annotations

import itertools
import re

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.config.checks import smallest_world
from megatron_rl.planning.components import CHECK, GENERATE, GIB, PHASES, SYNC, UPDATE

from .shipped import RECIPES, ROOT, checked, hardware, loaded, plan, runnable

pytestmark = pytest.mark.usefixtures("site")


@pytest.mark.parametrize("name", runnable())
def test_a_recipe_divides_and_fits_the_nodes_that_its_header_names(name: str) -> None:
    count, gib = hardware(name)
    made = plan(checked(name), 8 * count, gib)
    assert list(made.problems()) == []
    assert made.full_length_sequences >= 8


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
