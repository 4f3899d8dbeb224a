"""Configurations of other frameworks as recipes: units, what has no counterpart, and that what comes out passes the check."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.base.messages import ConfigError
from megatron_rl.base.typed_params import fields, unwrap
from megatron_rl.cli import main
from megatron_rl.config import Config, elsewhere, load_recipe
from megatron_rl.config.keys import entry_type
from megatron_rl.migrate import migrate

VERL = r"""
set -x
GROUP=8
export TAG=${TAG:-first}
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
    data.train_files=train.jsonl data.val_files="['test.jsonl']" \
    data.train_batch_size=32 data.max_prompt_length=64 data.max_response_length=192 data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path=model \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_epochs=2 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio=0.2 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    +actor_rollout_ref.actor.megatron.sequence_parallel=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=$GROUP actor_rollout_ref.rollout.top_p=0.9 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    actor_rollout_ref.rollout.val_kwargs.n=4 actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.95 actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    critic.optim.lr=1e-5 \
    trainer.logger='["console"]' trainer.experiment_name=sums_$TAG trainer.nnodes=2 trainer.n_gpus_per_node=8 \
    trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=3 $@
"""
NEMO_BASE = {
    "grpo": {"num_prompts_per_step": 64, "max_num_epochs": 2, "max_num_steps": 1_000_000, "val_period": 4, "seed": 7},
    "policy": {
        "precision": "bfloat16",
        "max_grad_norm": 0.5,
        "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 2},
    },
}
NEMO = {
    "defaults": "base.yaml",
    "grpo": {
        "num_prompts_per_step": 16,
        "num_generations_per_prompt": 4,
        "overlong_filtering": True,
        "normalize_rewards": True,
    },
    "loss_fn": {
        "reference_policy_kl_penalty": 0.01,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.28,
        "ratio_clip_c": None,
        "token_level_loss": False,
    },
    "checkpointing": {"enabled": True, "checkpoint_dir": "results/sums", "save_period": 10, "keep_top_k": 3},
    "policy": {
        "model_name": "model",
        "train_global_batch_size": 32,
        "train_micro_batch_size": 4,
        "max_total_sequence_length": 256,
        "megatron_cfg": {"enabled": False, "tensor_model_parallel_size": 8},
        "sequence_packing": {
            "enabled": True,
            "train_mb_tokens": "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}",
        },
        "optimizer": {"name": "AdamW", "kwargs": {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.98], "eps": 1e-8}},
        "generation": {
            "temperature": 0.8,
            "top_p": 1.0,
            "max_new_tokens": "${policy.max_total_sequence_length}",
            "vllm_cfg": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5},
        },
    },
    "data": {
        "max_input_seq_length": 56,
        "train_data_path": "train.jsonl",
        "input_key": "question",
        "output_key": "answer",
    },
    "env": {"math": {"num_workers": 8}},
    "cluster": {"gpus_per_node": 8, "num_nodes": 1},
}
TRL = {
    "model_name_or_path": "model",
    "dataset_name": "train.jsonl",
    "output_dir": "runs/sums",
    "learning_rate": 1e-5,
    "num_generations": 4,
    "generation_batch_size": 64,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "max_prompt_length": 64,
    "max_completion_length": 128,
    "beta": 0.04,
    "epsilon": 0.2,
    "epsilon_high": 0.3,
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "num_train_epochs": 1,
    "save_steps": 50,
    "use_vllm": True,
    "warmup_ratio": 0.1,
    "lr_scheduler_type": "constant",
    "temperature": 0.9,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, as far as the check reads one, and 100 training prompts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    shape = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    shape |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 1024}
    more = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4}
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], **more, **shape})
    )
    for name in ("tokenizer.json", "model.safetensors", "chat_template.jinja"):
        (tmp_path / "model" / name).touch()
    row = {"prompt": [{"role": "user", "content": "1+1"}], "question": "1+1", "answer": "2"}
    line = json.dumps({**row, "reward_model": {"ground_truth": "2"}}) + "\n"
    for name, count in (("train", 100), ("test", 4)):
        (tmp_path / f"{name}.jsonl").write_text(line * count)
    return tmp_path


def recipe(folder: Path, name: str, content: object, *overrides: str, **options: Any) -> tuple[Config, str]:
    """The recipe that is written, which `--check` must accept, and its text."""
    (folder / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    text = migrate(folder / name, overrides, **options)
    (folder / "mine.yaml").write_text(text)
    assert main(["train", "mine.yaml", "--check"]) == 0
    return load_recipe("mine.yaml"), text


def test_a_launch_script_of_verl(folder: Path) -> None:
    config, text = recipe(folder, "run.sh", VERL)
    trainer, actor, rollout, algorithm = config.trainer, config.actor, config.rollout, config.algorithm
    assert (trainer.prompts_per_step, trainer.minibatches, trainer.epochs) == (32, 4, 2), "8 prompts a minibatch"
    assert trainer.steps == 3 * (100 // 32), "3 epochs"
    assert (rollout.group_size, rollout.max_prompt_tokens, rollout.max_tokens, rollout.too_long) == (8, 64, 192, "drop")
    assert (rollout.tensor_parallel, rollout.memory_fraction, actor.parallel.tensor) == (2, 0.7, 2)
    assert actor.parallel.sequence
    assert (actor.optimizer.lr, actor.optimizer.weight_decay, actor.optimizer.betas) == (2e-6, 0.01, [0.9, 0.999])
    assert algorithm.surrogate.params == {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}, (
        "3 is on by default there"
    )
    assert (algorithm.aggregation, algorithm.kl.coef, algorithm.kl.estimator) == ("token-mean", 0.002, "k3")
    assert (trainer.eval_every, trainer.eval_rollouts, trainer.eval_temperature, trainer.eval_top_p) == (
        5,
        4,
        0.6,
        0.95,
    )
    assert (config.checkpoint.every, config.run_dir) == (0, "runs/sums_first")
    assert config.tasks.train["data"].columns.answer == "reward_model.ground_truth"
    assert config.tasks.eval["held_out"].path == "test.jsonl"
    assert "by verl's defaults, since it says nothing else: clip_ratio_c 3.0, loss_agg_mode token-mean" in text
    left = text[text.index("# Not taken over:") :]
    for name, why in (
        ("actor_rollout_ref.rollout.top_p: 0.9", "whole distribution"),
        ("critic.optim.lr", "there is no critic"),
        ("trainer.nnodes: 2", "submit.sh"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 4", "packed"),
    ):
        assert any(name in line and why in line for line in left.splitlines()), name


def test_a_configuration_of_nemo_rl_on_top_of_another(folder: Path) -> None:
    (folder / "base.yaml").write_text(yaml.safe_dump(NEMO_BASE))
    config, text = recipe(folder, "grpo.yaml", NEMO, "grpo.val_period=3")
    trainer, actor, rollout, algorithm = config.trainer, config.actor, config.rollout, config.algorithm
    assert (trainer.prompts_per_step, rollout.group_size) == (16, 4)
    assert trainer.minibatches == 2, "32 rollouts of 64"
    assert trainer.steps == 2 * (100 // 16), "2 epochs come before a million steps"
    assert (trainer.eval_every, config.seed, config.model.dtype) == (3, 7, "bfloat16")
    assert (rollout.max_prompt_tokens, rollout.max_tokens, rollout.temperature) == (56, 200, 0.8)
    assert actor.tokens_per_microbatch == 4 * 256
    assert (actor.parallel.tensor, rollout.tensor_parallel) == (2, 2), "of the backend that is on"
    assert (actor.optimizer.lr, actor.optimizer.betas, actor.optimizer.clip_grad) == (5e-6, [0.9, 0.98], 0.5)
    assert (algorithm.aggregation, algorithm.truncated) == ("seq-mean-token-mean", "mask")
    assert (algorithm.kl.coef, algorithm.surrogate.params["eps_high"]) == (0.01, 0.28)
    assert algorithm.surrogate.params.get("dual_clip") is None
    assert (config.checkpoint.every, config.checkpoint.keep, config.run_dir) == (10, 3, "results/sums")
    assert config.tasks.train["data"].columns.prompt == "question"
    assert "cluster.gpus_per_node: 8" in text


def test_a_configuration_of_trl(folder: Path) -> None:
    config, text = recipe(folder, "config.yaml", TRL)
    assert (config.trainer.prompts_per_step, config.trainer.minibatches) == (16, 2), "64 rollouts, 32 an update"
    assert config.trainer.steps == 100 // 16
    assert (config.algorithm.preset, config.algorithm.aggregation) == ("dr_grpo", "seq-mean-token-sum-norm")
    assert (config.algorithm.kl.coef, config.algorithm.surrogate.params["eps_high"]) == (0.04, 0.3)
    assert (config.rollout.max_tokens, config.rollout.temperature, config.checkpoint.every) == (128, 0.9, 50)
    assert "warmup_ratio: 0.1" in text


def test_epochs_without_a_number_of_prompts_are_left_to_the_reader(folder: Path) -> None:
    (folder / "train.jsonl").rename(folder / "data.bin")
    (folder / "run.sh").write_text(VERL)
    text = migrate(folder / "run.sh")
    assert "steps" not in yaml.safe_load(text)["trainer"]
    assert (
        "# steps: 3 epochs there, and how many prompts there are is not known here: set epochs x prompts / 32" in text
    )
    assert yaml.safe_load(migrate(folder / "run.sh", prompts=320))["trainer"]["steps"] == 30
    total = migrate(folder / "run.sh", ["trainer.total_training_steps=12"])
    assert yaml.safe_load(total)["trainer"]["steps"] == 12


def test_what_a_script_takes_from_the_environment_a_recipe_does_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORK", str(folder))
    named = VERL.replace("model.path=model", "model.path=$WORK/model").replace("sums_$TAG", "'x${UNSET:+_y}'")
    monkeypatch.setenv("UNSET", "")
    config, _ = recipe(folder, "run.sh", named.replace("clip_ratio=0.2", "clip_ratio_low=10"))
    assert config.model.path == str(folder / "model")
    assert config.algorithm.surrogate.params["eps_low"] == 0.999, "no bound"


def test_a_list_replaces_a_mapping_below_it(folder: Path) -> None:
    (folder / "base.yaml").write_text(yaml.safe_dump({**NEMO_BASE, "env": [{"math": 1}]}))
    assert recipe(folder, "grpo.yaml", NEMO)[0].rollout.group_size == 4


def test_odd_values_are_taken_over_or_named(folder: Path) -> None:
    """A date, what names a list, infinity, a text of several lines; a file that is no Parquet."""
    (folder / "bad.parquet").write_text("no Parquet")
    named = {
        "files": ["bad.parquet", "train.jsonl"],
        "started": date(2024, 1, 2),
        "data": {"train": {"data_path": "${files}"}, "dataset_name": "a\nb: c"},
        "policy": {"optimizer": {"kwargs": {"betas": "${betas}"}}},
        "grpo": {"max_num_steps": math.inf, "num_prompts_per_step": 2, "max_num_epochs": 3},
        "betas": [0.8, 0.9],
    }
    (folder / "odd.yaml").write_text(yaml.safe_dump(named))
    text = migrate(folder / "odd.yaml", ["trainer.name=2024-13-01", "a.b=0x_", "a.c=!!timestamp x"])
    recipe = yaml.safe_load(text)
    assert [task["path"] for task in recipe["tasks"]["train"].values()] == ["bad.parquet", "train.jsonl"]
    assert recipe["actor"]["optimizer"]["betas"] == [0.8, 0.9]
    assert "steps" not in recipe["trainer"]
    for line in (
        "# grpo.max_num_steps: inf is no number; set its counterpart by hand",
        "# steps: 3 epochs there, and how many prompts there are is not known here: set epochs x prompts / 2, or give",
        "#   started: '2024-01-02'",
        "#   trainer.name: '2024-13-01'",
    ):
        assert line in text
    named["data"] = {"dataset_name": "a\nb: c"}
    (folder / "odd.yaml").write_text(yaml.safe_dump(named))
    assert "b" not in yaml.safe_load(migrate(folder / "odd.yaml"))
    weights = {"reward_funcs": ["a.x", "a.y"], "reward_weights": ["one", 0.5], "num_generations": 4}
    (folder / "trl.yaml").write_text(yaml.safe_dump(weights))
    rewards = yaml.safe_load(migrate(folder / "trl.yaml"))["rewards"]
    assert [reward.get("weight") for reward in rewards.values()] == [None, 0.5]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grpo: ${a b}", "an interpolation is not well formed"),
        ("grpo: !!timestamp x", "is not valid YAML"),
        ("defaults: base.yaml", "base.yaml is not a text file in UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text: str, words: str, folder: Path) -> None:
    (folder / "base.yaml").write_bytes(b"\xff")
    (folder / "odd.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        migrate(folder / "odd.yaml")


def test_the_command_prints_the_recipe_and_refuses_what_is_nobodys(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.sh").write_text(VERL)
    assert main(["migrate", "run.sh", "data.train_batch_size=64", "--prompts", "640"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"] | {"x": 0} == {
        "steps": 30,
        "prompts_per_step": 64,
        "minibatches": 8,
        "epochs": 2,
        "x": 0,
        "eval_every": 5,
        "eval_rollouts": 4,
        "eval_temperature": 0.6,
        "eval_top_p": 0.95,
    }
    (folder / "other.yaml").write_text("a: {b: 1}\n")
    assert main(["migrate", "other.yaml"]) == 2
    assert "has no keys of verl (actor_rollout_ref), NeMo-RL (policy, grpo) or TRL's" in capsys.readouterr().err
    (folder / "ours.yaml").write_text("run_dir: runs/mine\nmodel: {path: m}\nseed: 1\n")
    assert main(["migrate", "ours.yaml"]) == 2
    assert "ours.yaml is a recipe already" in capsys.readouterr().err
    assert main(["migrate", "nothing.yaml"]) == 2
    with pytest.raises(ConfigError, match="write key=value"):
        migrate(folder / "run.sh", ["x"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "trainer.total_epochs=3",
            "verl's `trainer.total_epochs` is `trainer.steps` here (RL steps; an epoch has prompts / ",
        ),
        ("trainer.batch_size=64", "that is `trainer.prompts_per_step` here"),
        ("actor_rollout_ref.rollout.n=8", "verl's `actor_rollout_ref.rollout.n` is `rollout.group_size` here"),
        ("rollout.n=8", "is `rollout.group_size` here"),
        ("trainer.save_freq=5", "is `checkpoint.every` here"),
        ("rollout.top_p=0.9", "has no counterpart: training draws from the whole distribution"),
        ("learning_rate=1e-6", "TRL's `learning_rate` is `actor.optimizer.lr` here"),
        ("data.train_files=x", "verl's `data.train_files` is `tasks.train.<name>.path` here"),
        (
            "loss_fn.ratio_clip_max=0.28",
            "NeMo-RL's `loss_fn.ratio_clip_max` is `algorithm.surrogate.params.eps_high` here",
        ),
        ("critic.optim.lr=1", "there is no critic"),
        ("trainer.stepz=3", "did you mean `trainer.steps`?"),
    ],
)
def test_an_unknown_key_from_elsewhere_is_answered_with_ours(
    override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "cpu/quickstart.yaml", override, "--check"]) == 2
    assert words in capsys.readouterr().err


def exists(key: str) -> bool:
    hint: object = Config
    for part in key.split("."):
        if hint is dict or entry_type(hint) is Any:
            return True  # a method's own parameters
        hint = entry_type(hint) if part == "<name>" else fields(hint).get(part) if isinstance(hint, type) else None
        if hint is None:
            return False
        hint = unwrap(hint)[0]
    return True


def test_the_table_names_keys_that_exist_and_none_twice() -> None:
    names = [name for row in elsewhere.rows() for name in row.names()]
    assert len(names) == len(set(names))
    for row in elsewhere.rows():
        assert row.here or row.says
        assert all(exists(key) for key in row.here), row.here
    assert all(exists(key) for key in elsewhere._ALSO.values())
