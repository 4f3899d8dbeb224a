"""Options that would do nothing are refused, by one table of conditions; and every key of the schema is in it, or stands
among those that always have an effect, or that another check refuses."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from megatron_rl.base.typed_params import STRICT, fields, unwrap
from megatron_rl.cli import main
from megatron_rl.config import Config, ConfigError, Machine, check, load_recipe
from megatron_rl.config.inactive import ONLY
from megatron_rl.config.keys import choices, entry_type

QUICKSTART = "recipes/cpu/quickstart.yaml"

# Sections of which every key has an effect wherever the command reads the section, or is refused by the check of that name.
ELSEWHERE = {
    "tasks": "tasks.task_checks: keys belong to the source",
    "model": "model_checks",
    "actor.fp8": "null or in effect; actor_checks",
    "actor.lora": "null or in effect; actor_checks",
    "actor.moe": "actor_checks, by the model's experts",
    "actor.parallel": "checks: layouts",
    "algorithm.correction.filters": "algorithm",
    "rollout.partial": "null or in effect; rollout_checks",
    "rewards.<name>.condition": "null or in effect",
    "evaluation.endpoint": "evaluate --endpoint",
}
# Keys that have an effect in every recipe whose command reads their section. A new key goes here or gets a condition.
ALWAYS = {
    "run_dir seed",
    "rewards.<name>: reward params tasks condition when_needed",
    "algorithm: preset plugins ratio aggregation max_length entropy_coef truncated resample_rounds",
    "algorithm: credit drop_zero_variance_groups zero_variance_rewards",
    "algorithm.estimator: name params",
    "algorithm.surrogate: name params",
    "algorithm.kl: coef reward_coef",
    "algorithm.correction: weight filters",
    "algorithm.overlong: share",
    "rollout: tensor_parallel expert_parallel fp8 group_size max_prompt_tokens max_tokens temperature too_long",
    "rollout: memory_fraction partial exact",
    "rollout: cpu_cache_gib max_concurrent async_scheduling sync sync_check_every sync_check_rollouts sync_tolerance",
    "rollout: speculation",
    "rollout.speculation: tokens below",
    "actor: tokens_per_microbatch logits_mib recompute overlap freeze_vision_tower offload offload_weights fp8 lora",
    *(
        f"{section}.optimizer: lr schedule warmup_steps betas eps weight_decay clip_grad distributed moments device"
        for section in ("actor", "sft", "reward_model")
    ),
    "sft: steps epochs batch_size log_every eval_every",
    "reward_model: steps epochs batch_size log_every eval_every centering",
    "trainer: steps prompts_per_step minibatches epochs eval_every eval_rollouts eval_temperature eval_max_prompts",
    "trainer: eval_reward eval_threshold like_lengths",
    "evaluation: pass_k confidence length_limit format_reward bug_reward pass_rate_reward pairwise style",
    "evaluation.harness: name",
    "checkpoint: every export",
    "logging: tensorboard wandb mlflow report samples_per_step record_every gradient_variance_every",
    "launch: processes generators timeout_minutes preflight",
    "watchdog: enabled",
}


def keys(section: type = Config, path: str = "") -> Iterator[tuple[str, object]]:
    """Every key of the schema that is no section, `<name>` for entries, with its type."""
    for name, hint in fields(section).items():
        inner, where = unwrap(hint)[0], f"{path}.{name}" if path else name
        entry = entry_type(inner)
        if dataclasses.is_dataclass(inner):
            yield from keys(typing.cast(type, inner), where)
            if unwrap(hint)[1]:
                yield where, hint
        elif dataclasses.is_dataclass(entry):
            yield from keys(typing.cast(type, entry), f"{where}.<name>")
        else:
            yield where, hint


def test_every_key_is_declared_always_active_or_with_a_condition() -> None:
    always = set[str]()
    for line in ALWAYS:
        section, colon, names = line.partition(": ")
        always |= {f"{section}.{name}" for name in names.split()} if colon else set(line.split())
    known = {key for key, _ in keys()}
    assert not (always | ONLY.keys()) - known, "no such keys"
    assert not always & ONLY.keys(), "both"
    left = {
        key for key in known - always - ONLY.keys() if not any(key.startswith(f"{section}.") for section in ELSEWHERE)
    }
    assert not left, "new keys: give them a condition in config/inactive.py, or add them to ALWAYS"


def other(hint: object, default: object) -> str:
    """A value of this type that is not the default, as an override has it."""
    inner, _ = unwrap(hint)
    if typing.get_origin(inner) is dict:
        return "{update: 7}"
    if typing.get_origin(inner) is list:
        items = typing.get_args(inner)[0]
        return f"[{(choices(items) or ('x',))[0]}]"
    if words := choices(inner):
        return next(word for word in words if word != default)
    candidates: dict[object, list[Any]] = {bool: [not default], int: [3, 7, 1], float: [1e-9, 0.25, 3.0], str: ["x"]}
    return str(next(value for value in candidates[inner] if value != default and fits(value, hint))).lower()


def fits(value: object, hint: Any) -> bool:
    try:
        TypeAdapter(hint, config=STRICT).validate_python(value)
    except ValidationError:
        return False
    return True


def at(config: object, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("pattern", sorted(ONLY))
def test_a_key_that_does_nothing_is_refused_by_name(pattern: str) -> None:
    """The quick start, in which nothing is on that any of them needs."""
    key = pattern.replace("train.<name>", "train.chain_sum").replace("rewards.<name>", "rewards.judge")
    off = ["checkpoint.every=0", "watchdog.enabled=false", "sft.optimizer.schedule=constant"]
    before = load_recipe(QUICKSTART, off)
    check(before, machine=Machine())
    override = f"{key}={other(dict(keys())[pattern], at(before, key))}"
    with pytest.raises(ConfigError, match=rf"`{key}` \(.*\) does nothing .*; "):
        check(load_recipe(QUICKSTART, [*off, override]), machine=Machine())


def test_a_source_that_switches_a_feature_off_needs_no_further_words(write: Callable[..., Any]) -> None:
    path = write(
        {
            "run_dir": "runs/x",
            "checkpoint": {"every": 5, "keep": 7},
            "actor": {
                "optimizer": {"schedule": "cosine", "min_lr": 1e-7, "lr": 1e-5},
                "lora": {"rank": 8, "alpha": 16},
            },
            "tasks": {"train": {name: {"source": "jsonl", "path": "x", "weight": 2} for name in "ab"}},
            "watchdog": {"default_minutes": 5.0},
        }
    )
    on = load_recipe(path)
    assert (on.checkpoint.keep, on.actor.optimizer.min_lr, on.watchdog.default_minutes) == (7, 1e-7, 5.0)
    switches = ["checkpoint.every=0", "actor.optimizer.schedule=constant", "actor.lora=null", "tasks.train.b=null"]
    off = load_recipe(path, [*switches, "watchdog.enabled=false"])
    assert (off.checkpoint.keep, off.actor.optimizer.min_lr, off.watchdog.default_minutes) == (2, 0.0, 20.0)
    assert (off.actor.lora, off.tasks.train["a"].weight) == (None, None)
    said = load_recipe(path, ["checkpoint.every=0", "checkpoint.keep=3"])
    assert said.checkpoint.keep == 3, "and so `check` refuses it"


@pytest.mark.parametrize("section", ["sft", "reward_model"])
def test_of_steps_and_epochs_the_later_source_wins(section: str, write: Callable[..., Any]) -> None:
    by_epochs = write({"run_dir": "x", section: {"epochs": 2.0}}, "epochs.yaml")
    by_steps = write({"run_dir": "x", section: {"steps": 9}}, "steps.yaml")
    for path, override, found in (
        (by_epochs, "steps=5", (5, None)),
        (by_epochs, "steps=0", (0, None)),
        (by_epochs, "epochs=3", (0, 3.0)),
        (by_steps, "epochs=3", (0, 3.0)),
        (by_steps, "steps=5", (5, None)),
    ):
        stage = getattr(load_recipe(path, [f"{section}.{override}"]), section)
        assert (stage.steps, stage.epochs) == found, (path, override)
    with pytest.raises(ConfigError, match=rf"`{section}.steps` and `{section}.epochs` say the same twice; keep one"):
        load_recipe(write({"run_dir": "x", section: {"steps": 9, "epochs": 2}}))


@pytest.mark.parametrize(
    ("command", "override", "words"),
    [
        ("sft", "actor.optimizer.lr=1", "sft does not read it; its own is sft.optimizer.lr"),
        ("reward-model", "actor.optimizer.lr=1", "its own is reward_model.optimizer.lr"),
        ("sft", "reward_model.steps=3", "its own is sft.steps"),
        ("sft", "algorithm.preset=gdpo", "sft does not read it; leave it out"),
        ("reward-model", "launch.generators=1", "reward-model does not read it; leave it out"),
        ("reward-model", "trainer.steps=3", "its own is reward_model.steps"),
        ("train", "reward_model.steps=3", "train does not read it; leave it out"),
        ("train", "evaluation.harness.name=lm_eval", "train does not read it; leave it out"),
        ("sft", "evaluation.endpoint.retries=3", "sft does not read it; leave it out"),
    ],
)
def test_an_override_that_the_command_does_not_read_is_refused(
    command: str, override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "cpu/preference_reward.yaml", override, "--check"]) == 2
    assert words in capsys.readouterr().err
