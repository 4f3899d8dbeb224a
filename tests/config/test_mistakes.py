"""Mistakes that people make, and the words that help: each was tried on an earlier version, which left them alone with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.sample import Sample
from megatron_rl.rewards import RewardError
from megatron_rl.rewards.scorer import Scorer
from tests.config.conftest import RECIPE

Say = Callable[..., str]


@pytest.fixture
def said(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Say:
    """What `megatron-rl train RECIPE ... --check` answers, which must be a refusal."""

    def said(*overrides: str, recipe: str = "recipe.yaml", **sections: Any) -> str:
        write({**RECIPE, **sections}, recipe)
        assert main(["train", recipe, *overrides, "--check"]) == 2
        return capsys.readouterr().err

    return said


def model_folder(folder: Path, **tokenizer: object) -> None:
    """As far as the check reads one."""
    folder.mkdir(parents=True)
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    shape |= {"intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 512}
    more = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **more, **shape}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


def test_a_name_of_the_hub_is_no_folder(said: Say) -> None:
    text = said("model.path=Qwen/Qwen2.5-0.5B")
    assert "`model.path`: Qwen/Qwen2.5-0.5B does not exist in " in text
    assert "`hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B`, then model.path=Qwen2.5-0.5B" in text


def test_overrides_have_no_dashes(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    write(RECIPE)
    with pytest.raises(SystemExit):
        main(["train", "recipe.yaml", "--trainer.steps=5"])
    assert "overrides have no dashes: trainer.steps=5" in capsys.readouterr().err


def test_there_is_no_critic(said: Say) -> None:
    text = said("algorithm.preset=ppo")
    assert "there is no critic here" in text
    assert "dapo" in text


@pytest.mark.parametrize("text", ['[{"prompt": "q"}]', '[\n  {"prompt": "q"}\n]', '[\n{"prompt": "q"}\n]'])
def test_a_json_array_is_no_json_lines(said: Say, tmp_path: Path, text: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    found = said(tasks={"train": {"mine": {"source": "jsonl", "path": "data.jsonl"}}})
    assert "data.jsonl is one JSON array; JSON Lines has one object a line: jq -c '.[]' data.jsonl" in found


def test_null_removes_an_entry_not_a_section(said: Say) -> None:
    assert "`tasks.eval` is a mapping from names to values, not null; to remove an entry: tasks.eval.NAME=null" in said(
        "tasks.eval=null"
    )


def test_an_error_in_a_reward_names_the_user_s_line_and_the_metadata(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def hard():\n    def score(completion, sample):\n        return sample['metadata']['difficulty']\n"
    )
    file.write_text(file.read_text() + "    return score\n")
    scorer = Scorer({"hard": RewardConfig(reward=f"{file}:hard")})
    sample = Sample("t/0", "t", "q", [1], None, None, None, {"level": 3, "topic": "x"})
    with pytest.raises(
        RewardError, match=r"KeyError: 'difficulty' \(.*mine\.py, line 3\); .* metadata has level, topic"
    ):
        scorer.score(["a"], [sample])


@pytest.mark.parametrize("command", ["report", "status"])
def test_a_folder_of_runs_names_those_in_it(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").touch()
    assert main([command, str(tmp_path / "runs")]) == 2
    assert f"there is {tmp_path}/runs/a, {tmp_path}/runs/b" in capsys.readouterr().err


def test_a_missing_file_is_looked_for_beside_the_recipe(said: Say, tmp_path: Path) -> None:
    for name in ("my_methods.py", "my_rewards.py", "my_rows.py", "data.jsonl"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text("")
    model_folder(tmp_path / "mine" / "model")
    text = said(
        recipe="mine/recipe.yaml",
        algorithm={"plugins": ["my_methods.py"]},
        rewards={"own": {"reward": "my_rewards.py:f"}},
        model={"path": "model"},
        tasks={"train": {"a": {"source": "jsonl", "path": "data.jsonl"}, "b": {"source": "my_rows.py:f"}}},
    )
    for key, name in (
        ("algorithm.plugins", "my_methods.py"),
        ("rewards.own.reward", "my_rewards.py"),
        ("model.path", "model"),
        ("tasks.train.a.path", "data.jsonl"),
        ("tasks.train.b.source", "my_rows.py"),
    ):
        assert f"`{key}`: {name} does not exist in {tmp_path}, where paths in recipes begin" in text
        assert f"{key}=mine/{name}" in text


def test_a_recipe_that_is_not_there_names_the_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert main(["train", "mine.yaml", "--check"]) == 2
    assert f"mine.yaml does not exist in {tmp_path}" in capsys.readouterr().err


CHAT = {"train": {"a": {"source": "reasoning_gym", "name": "chain_sum", "size": 10, "chat": True}}}


def test_a_chat_template_that_the_tokenizer_does_not_have_is_missed_at_once(said: Say, tmp_path: Path) -> None:
    model_folder(tmp_path / "bare", model_max_length=512)
    text = said(model={"path": "bare"}, tasks=CHAT)
    assert "`tasks.train.a.chat` applies the tokenizer's chat template, and bare has none" in text
    model_folder(tmp_path / "own", chat_template="{{ messages }}")
    model_folder(tmp_path / "file")
    (tmp_path / "file" / "chat_template.jinja").write_text("{{ messages }}")
    for folder in ("own", "file"):
        Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "model": {"path": folder}, "tasks": CHAT}))
        assert main(["train", "recipe.yaml", "--check"]) == 0


def test_weights_that_are_smaller_than_a_block_have_a_remedy_that_can_be_had(said: Say) -> None:
    text = said("rollout.fp8=blockwise", "algorithm.correction.weight=none")
    assert re.search(r"has \d+ rows, and blocks have 128; name it in rollout.fp8_skip", text)
    assert "lower rollout.tensor_parallel" not in text


def test_a_harness_is_not_bound_by_the_lengths_of_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_folder(
        tmp_path / "model", chat_template="{{ messages }}"
    )  # 512 positions; rollouts have 512 + 512 by default
    asked = ["evaluate", "--harness", "lm_eval", "--model", str(tmp_path / "model"), f"run_dir={tmp_path / 'run'}"]
    assert main([*asked, "--check"]) == 0, capsys.readouterr().err
