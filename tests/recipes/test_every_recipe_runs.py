"""Every recipe of recipes/ runs: its own algorithm, rewards, prompts and settings, on a tiny model and tiny data.

One training step with the evaluations around it, the checkpoint and the export; or an evaluation. What is
changed in a recipe stands in `tiny.overrides`. A recipe's model is a small one of the same family under the same name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.commands import evaluate, run_recipe
from megatron_rl.config import Config, ConfigError, Machine, load_recipe, to_yaml
from megatron_rl.config.algorithm_checks import reward_columns
from megatron_rl.preflight.recipe import check_recipe
from megatron_rl.runtime.attempts import new_attempt, rank_environment
from megatron_rl.weights.create import create_model
from tests.rewards.chat_server import ChatServer
from tests.rewards.tiny_models import classifier
from tests.warm import run_ranks

from . import in_turn, tiny

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


def recipes(evaluations: bool) -> list[str]:
    paths = (path.relative_to(RECIPES) for path in RECIPES.rglob("*.yaml"))
    whole = (path for path in paths if not any(part.startswith("_") for part in path.parts))
    return sorted(str(path) for path in whole if (path.parts[0] == "eval") == evaluations)


HARNESSES = ["eval/bfcl.yaml", "eval/evalplus.yaml", "eval/mmlu_pro.yaml"]  # tests/e2e/test_harnesses.py
LIKE_ANOTHER = ["eval/arena_hard_v01.yaml", "eval/creative_writing.yaml"]  # arena_hard_v2 with other data and words
TRAININGS = recipes(False)
EVALUATIONS = [name for name in recipes(True) if name not in (*HARNESSES, *LIKE_ANOTHER)]
REWARD_MODELS = ["cpu/preference_reward.yaml"]
# The model of an evaluation: what a training run has left.
EVALUATED = {
    "eval/api_bank.yaml": "runs/awpo/qwen3-8b/export",
    "eval/arena_hard_v2.yaml": "runs/awpo/qwen3-8b/export",
    "eval/code.yaml": "runs/gdpo/code-7b/export",
    "eval/gsm8k.yaml": "runs/scale/qwen3-30b-a3b/export",
    "eval/maths_dgpo.yaml": "runs/dgpo/14b/export",
    "eval/maths_gdpo.yaml": "runs/gdpo/math-7b/checkpoints/step_1",
    "eval/maths_shrinkage.yaml": "runs/shrinkage/math-7b/export",
    "eval/puzzles.yaml": "runs/shrinkage/maze/checkpoints/step_1",
}


@dataclass
class Ran:
    """What became of all runs."""

    root: Path
    configs: dict[str, Config] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)  # run folder -> exit code
    messages: list[str] = field(default_factory=list)  # of worlds that failed
    judged: int = 0  # requests that the judge's server has answered

    def config(self, name: str) -> Config:
        """After its run, which must have ended well."""
        config = self.configs.get(name, Config(run_dir="not started"))
        assert self.outcomes.get(config.run_dir) == 0, "\n".join(self.messages)
        return config

    def rows(self, name: str) -> list[dict[str, Any]]:
        lines = (Path(self.config(name).run_dir) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    root = tmp_path_factory.mktemp("recipes")
    judge = ChatServer(answer)
    with pytest.MonkeyPatch.context() as patch, judge:
        for name, value in {
            "MODELS": root / "models",
            "DATA": root / "data",
            "JUDGE_URL": judge.url,
            "REWARD_MODEL_URL": judge.url.removesuffix("/v1"),
            "REWARD_MODEL": classifier(root / "reward_model"),
            "TEACHER_URL": judge.url,
            "TEACHER": teacher(root / "teacher"),
            "HF_HUB_OFFLINE": 1,
            "CUDA_VISIBLE_DEVICES": "",
        }.items():
            patch.setenv(name, str(value))
        patch.chdir(ROOT)  # recipes name files of the repository
        ran = Ran(root)
        arguments = {name: prepared(name, root) for name in [*TRAININGS, *EVALUATIONS]}
        write_models([load_recipe(RECIPES / name, arguments[name]) for name in TRAININGS], root / "models")
        trainings = {name: checked(name, arguments[name], root) for name in TRAININGS}
        ran.configs |= trainings
        worlds: dict[int, list[list[str]]] = {1: [], 2: []}
        for config in trainings.values():
            worlds[config.launch.processes or 1].append([command_of(config), written(config), "never"])
        run_in_turn(ran, worlds[2])
        for name in EVALUATIONS:
            try:
                config, resume = evaluated(name, arguments[name], root)
            except ConfigError as error:  # the run whose model it is has failed
                ran.messages.append(f"{name}: {error}")
                continue
            ran.configs[name] = config
            worlds[1].append(["evaluate", written(config), resume])
        run_in_turn(ran, worlds[1][::2], worlds[1][1::2])
        ran.judged = len(judge.requests)
        yield ran


def answer(number: int, body: dict[str, Any]) -> str:
    """A judge's grade or verdict, or what a served reward model says."""
    if "<answer_a_" in json.dumps(body):
        return "say:[[A>B]]"
    if "use_activation" in body:
        return "raw:" + json.dumps({"data": [{"probs": [number % 7]}]})
    if (
        "prompt_logprobs" in body
    ):  # of a model whose every token is as probable, and whose tokenizer leaves no readable text
        entries = [
            {str(token): {"logprob": -2.0, "decoded_token": "\N{REPLACEMENT CHARACTER}"}} for token in body["prompt"]
        ]
        return "raw:" + json.dumps({"choices": [{"prompt_logprobs": [None, *entries[1:]]}]})
    return f"score:{number % 5 / 4}"


def teacher(folder: Path) -> Path:
    """A model of the quick start's kind with other weights."""
    shape = load_recipe(RECIPES / "cpu/quickstart.yaml").model.create
    assert shape is not None
    create_model(folder, shape, seed=7)
    return folder


def prepared(name: str, root: Path) -> list[str]:
    """Writes the data that the recipe reads; its overrides."""
    as_it_is = load_recipe(RECIPES / name)
    tiny.write_data([as_it_is], root / "hub")
    return [*tiny.overrides(as_it_is, root / "hub"), f"run_dir={root / as_it_is.run_dir}"]


def write_models(configs: list[Config], folder: Path) -> None:
    """Each model that the recipes name; it knows answers to the prompts of all recipes that train it."""
    forms: dict[str, set[str]] = {}
    temperatures: dict[str, float] = {}
    for config in configs:
        if config.model.path is not None:
            name, temperature = Path(config.model.path).name, config.rollout.temperature
            forms.setdefault(name, set()).update(tiny.right_responses(config))
            temperatures[name] = min(temperature, temperatures.get(name, temperature))
    for name, responses in forms.items():
        tiny.write_model(folder / name, name, responses, temperatures[name])


def checked(name: str, overrides: list[str], root: Path) -> Config:
    """As `megatron-rl train` takes the recipe, on a machine without a GPU."""
    config = load_recipe(RECIPES / name, overrides)
    config = check_recipe(config, command_of(config), Machine(gpus=0))
    run_recipe.check_machine(config, Machine(gpus=0))
    return config


def evaluated(name: str, overrides: list[str], root: Path) -> tuple[Config, str]:
    """As `megatron-rl evaluate RECIPE --model` takes it; and the checkpoint whose weights are loaded."""
    args = argparse.Namespace(
        command="evaluate",
        recipe=str(RECIPES / name),
        overrides=overrides,
        model=str(root / EVALUATED[name]),
        endpoint=None,
        served_name=None,
        harness=None,
    )
    config, checkpoint = evaluate._resolve(args, Machine(gpus=0))
    return config, "never" if checkpoint is None else str(checkpoint.folder)


def command_of(config: Config) -> str:
    """What the recipe is for."""
    return "reward-model" if config.reward_model.wanted else "train"


def written(config: Config) -> str:
    """Its run folder, with the resolved recipe."""
    folder = Path(config.run_dir)
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(to_yaml(config))
    return config.run_dir


def run_in_turn(ran: Ran, *lists: list[list[str]]) -> None:
    """Runs one list on two ranks, or two lists at a time on one rank each. Other processes go on behind a run that failed."""
    for attempt in itertools.count():
        rest = [[run for run in runs if run[1] not in ran.outcomes] for runs in lists]
        if not any(rest):
            return
        folder = ran.root / f"{len(lists)}_{attempt}"
        folder.mkdir()
        (folder / "lists.json").write_text(json.dumps(rest))
        command = [sys.executable, str(in_turn.__file__), str(folder / "lists.json"), str(folder)]
        outcome = run_ranks(command, 2, new_attempt(folder), {**rank_environment(0), "OMP_NUM_THREADS": "1"})
        for file in folder.glob("*.jsonl"):
            ran.outcomes |= dict(json.loads(line) for line in file.read_text().splitlines())
        if outcome.code:
            ran.messages.append(outcome.message)
            for runs in rest:  # a process that was killed, or crashed, has written nothing
                begun = next((run[1] for run in runs if run[1] not in ran.outcomes), None)
                if begun is not None and not any(ran.outcomes.get(run[1]) for run in runs):
                    ran.outcomes[begun] = outcome.code


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_a_reward_models_recipe_takes_steps_that_learn(ran: Ran, name: str) -> None:
    config = ran.config(name)
    rows = ran.rows(name)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert {f"eval/{task}/accuracy" for task in config.tasks.eval} <= rows[-1].keys()
    assert (Path(config.run_dir) / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", sorted({*TRAININGS} - {*REWARD_MODELS}))
def test_a_training_recipe_takes_a_step_that_learns(ran: Ran, name: str) -> None:
    config = ran.config(name)
    before, after = ran.rows(name)
    assert all(math.isfinite(value) for row in (before, after) for value in row.values())
    for row in (before, after):
        assert {f"eval/{task}/avg@{config.trainer.eval_rollouts}" for task in config.tasks.eval} <= row.keys()
    assert {f"reward/{column}" for column in reward_columns(config)} <= after.keys()
    assert after["actor/updates"] == config.trainer.minibatches * config.trainer.epochs
    if not config.sft.steps:  # after two steps of warm-up a model is not right yet
        assert after["groups/signal_share"] > 0
        assert after["actor/grad_norm"] > 0
    assert (Path(config.run_dir) / "export" / "model.safetensors").is_file()
    assert (Path(config.run_dir) / "checkpoints" / "step_1" / "manifest.json").is_file()


@pytest.mark.parametrize("name", ["cpu/distillation.yaml", "distillation/qwen3-8b.yaml"])
def test_the_reverse_kl_of_the_rollouts_is_that_of_the_tokens_that_are_trained_on(ran: Ran, name: str) -> None:
    """Of the sampler's numbers and of the learner's tokens, which an exchange lies between; nothing else is rewarded."""
    _, after = ran.rows(name)
    assert after["distillation/reverse_kl"] != 0
    assert after["token_advantage/mean"] == pytest.approx(-after["distillation/reverse_kl"], rel=1e-5)
    assert (after["advantage/max"], after["groups/signal_share"]) == (0, 1)


def test_awpos_judge_is_asked(ran: Ran) -> None:
    rows = [ran.rows(name)[1] for name in TRAININGS if name.startswith("awpo/")]
    assert len(rows) == 5
    asked = [row["judge/scored"] - row["judge/cache_hits"] for row in rows]
    assert all(count > 0 for count in asked)
    assert ran.judged >= sum(asked)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_recipe_says_how_good_a_trained_model_is(ran: Ran, name: str) -> None:
    config = ran.config(name)
    content = json.loads((Path(config.run_dir) / "evaluation.json").read_text())
    assert content["model"]["backend"] == ("checkpoint" if "/checkpoints/" in EVALUATED[name] else "engine")
    for task in config.tasks.eval:
        assert f"eval/{task}/avg@{config.trainer.eval_rollouts}" in content["metrics"]
        responses = (Path(config.run_dir) / "samples" / f"{task}.jsonl").read_text().splitlines()
        assert len(responses) >= config.trainer.eval_rollouts


def test_every_evaluation_has_a_door() -> None:
    assert EVALUATED.keys() == set(EVALUATIONS)
