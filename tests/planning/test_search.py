"""The search for layouts: what is among its candidates, that nothing better is missed, and the recipe that it writes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.config import Machine, load_recipe
from megatron_rl.config.actor import ParallelConfig
from megatron_rl.config.published import published_config
from megatron_rl.models import model_of
from megatron_rl.planning.components import GIB
from megatron_rl.planning.memory import make_plan
from megatron_rl.planning.search import Found, Space
from megatron_rl.planning.time.hardware import TABLES
from megatron_rl.planning.time.lengths import Lengths
from megatron_rl.planning.time.step import OLD, REFERENCE, UPDATE, Predictor

RECIPES = Path(__file__).parents[2] / "recipes"


def space(recipe: str, gpus: int, name: str | None = None) -> tuple[Space, Predictor]:
    config = load_recipe(RECIPES / "scale" / f"{recipe}.yaml")
    found = published_config(name or (config.model.path or "").rpartition("/")[2])
    assert found is not None
    node = min(8, gpus)
    machine = Machine(gpus=node, world_size=gpus, local_world_size=node)
    made = Space(config, model_of(found), found, machine, 79 * GIB, headroom=3 * GIB)
    return made, Predictor(made.model, TABLES["h100"], Lengths.log_normal(3000, 8192, prompt=200))


def test_old_log_probs_have_a_pass_where_the_trainer_makes_one() -> None:
    """Those of the first minibatch come from its update, unless a correction or dropout needs them before."""
    made, predictor = space("qwen3-8b", 16)
    config = made.config
    assert config.actor.lora is None
    plan = make_plan(config, made.model, 16, 79 * GIB)

    def seconds(minibatches: int, weight: str = "none") -> dict[str, float]:
        trainer = replace(config.trainer, minibatches=minibatches)
        corrected = replace(config.algorithm, correction=replace(config.algorithm.correction, weight=weight))
        return dict(predictor.of(replace(config, trainer=trainer, algorithm=corrected), plan).seconds)

    whole = seconds(4, "token")[OLD]
    assert seconds(4)[OLD] == pytest.approx(0.75 * whole)
    assert OLD not in seconds(1)
    assert OLD in seconds(1, "token")
    four = replace(config, trainer=replace(config.trainer, minibatches=4))
    assert predictor.training_seconds(four, 16) == pytest.approx(
        sum(value for name, value in seconds(4).items() if name in (OLD, REFERENCE, UPDATE)), rel=0.2
    )


# Recipe, GPUs, NeMo-RL's layouts (tensor, context, expert, pipeline, virtual stages; engine), of 8B those of Llama 3.1;
# Megatron-Bridge's pre-training layouts, which have none: the largest beside engines of ours.
PUBLISHED = [
    ("qwen3-8b", 16, (1, 1, 1, 2, 1), 1),
    ("qwen3-8b", 8, (1, 1, 1, 1, 1), None),
    ("qwen3-32b", 32, (4, 1, 1, 4, 1), 4),
    ("qwen3-30b-a3b", 32, (1, 1, 8, 1, 1), 2),
    ("qwen3-30b-a3b", 32, (1, 1, 8, 2, 1), 2),
    ("qwen3-30b-a3b", 16, (1, 1, 16, 1, 1), None),
    ("qwen3-235b-a22b", 128, (2, 2, 16, 8, 1), 8),
    ("qwen3-235b-a22b", 128, (4, 1, 16, 8, 1), 8),
    ("qwen3-235b-a22b", 256, (2, 1, 32, 8, 4), 8),
]


@cache
def searched(recipe: str, gpus: int) -> tuple[Space, Predictor, Found]:
    """With the fastest layout."""
    made, predictor = space(recipe, gpus)
    return made, predictor, made.search(predictor)[0]


@pytest.mark.parametrize(("recipe", "gpus", "layout", "engine"), PUBLISHED)
def test_published_layouts_are_candidates_and_none_is_better_than_the_found_one(
    recipe: str, gpus: int, layout: tuple[int, int, int, int, int], engine: int | None
) -> None:
    made, _ = space(recipe, gpus)
    tensor, context, expert, pipeline, virtual = layout
    wanted = ParallelConfig(tensor, pipeline, virtual, context, expert, 1, sequence=tensor > 1)
    assert [parallel for parallel in made.parallels() if parallel == wanted]
    if engine is None:
        return
    made, predictor, best = searched(recipe, gpus)
    engines = [one for one in made.engines() if one.tensor_parallel == engine]
    assert engines
    assert best.headroom >= made.headroom
    for actor, weights in itertools.product(made.actors(wanted), (False, True)):
        whole = replace(actor, offload=True, offload_weights=weights)
        for one in (one for rollout in engines for one in made.with_engine(predictor, whole, rollout)):
            assert best.step.total <= one.step.total


def test_nothing_better_is_missed_in_a_small_world() -> None:
    made, predictor = space("qwen3-8b", 2, "Qwen3-1.7B")
    best = made.search(predictor)
    every = [
        one
        for parallel in made.parallels()
        for actor in made.actors(parallel)
        for offload, weights in ((False, False), (True, False), (True, True))
        for rollout in made.engines()
        for room in (3, 48)
        for one in replace(made, headroom=room * GIB).with_engine(
            predictor, replace(actor, offload=offload, offload_weights=weights), rollout
        )
    ]
    assert len(every) > 100
    every.sort(key=lambda one: one.step.total)
    for free in (3 * GIB, 48 * GIB):
        fastest = next(one for one in every if one.headroom >= free and made.accepts(one.config))
        found = next(one for one in best if one.headroom >= free)
        assert found.step.total <= 1.01 * fastest.step.total
    assert [one.step.total for one in best] == sorted(one.step.total for one in best)
    assert [one.headroom for one in best] == sorted(one.headroom for one in best)


def test_the_best_is_written_as_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, written = str(RECIPES / "scale" / "qwen3-8b.yaml"), tmp_path / "found.yaml"
    assert (
        main(["plan", recipe, "--nodes", "2", "--search", "--json", "--write", str(written), "trainer.minibatches=2"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["layouts"][0]["step_time"]["seconds"]["step"] < found["given"]["step_time"]["seconds"]["step"]
    assert written.read_text().splitlines()[1].startswith("base: ")
    assert load_recipe(written).trainer.minibatches == 2
    assert main(["plan", str(written), "--nodes", "2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["step_time"]
    assert planned["seconds"] == pytest.approx(found["layouts"][0]["step_time"]["seconds"])
    assert main(["plan", recipe, "--nodes", "2", "--search", "--write", str(written)]) == 2
    assert "the file exists" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "found.yaml"
    quick = ["plan", str(RECIPES / "cpu" / "quickstart.yaml"), "--gpus-per-node", "1", "--search"]
    assert main([*quick, "--write", str(place)]) == 2
    assert f"--write {place}: " in capsys.readouterr().err


def test_a_model_in_the_home_folder_is_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = published_config("Qwen3-1.7B")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / "own" / name).touch()
    assert main(["plan", str(RECIPES / "scale" / "qwen3-8b.yaml"), "--nodes", "1", "--search", "model.path=~/own"]) == 0


def test_what_fits_nowhere_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "scale" / "qwen3-235b-a22b.yaml")
    assert main(["plan", recipe, "--nodes", "1", "--search"]) == 1
    assert "NO LAYOUT FITS" in capsys.readouterr().out


def test_more_gpus_in_a_node_than_the_model_has_heads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPES / "cpu" / "quickstart.yaml"), "--search"]) == 0
    assert "DP8" in capsys.readouterr().out


def test_layouts_that_fit_easily_stay_when_real_modules_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "TORCH_COMPILE_DISABLE"):
        monkeypatch.setenv(name, "1" if name.startswith("TORCH") else "")  # put back after the command has set them
    arguments = ["plan", str(RECIPES / "cpu" / "quickstart.yaml"), "--gpus-per-node", "2", "--search", "--json"]
    quick, exact = (
        main([*arguments, *more]) or json.loads(capsys.readouterr().out)["layouts"] for more in ([], ["--exact"])
    )
    assert [one["rollout"] for one in exact] == [one["rollout"] for one in quick]
