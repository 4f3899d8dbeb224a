"""Which keys of a recipe have an effect only together with others: one table, one check that refuses the rest.

A key that differs from its default (the preset's, where that sets it) while it does nothing is refused by name. Where a later
source, an override say, has switched the feature off, the keys of earlier sources that only described it are left out instead
(`load`): `checkpoint.every=0` needs no further words on a recipe that sets `checkpoint.keep`.

Not here, because other checks know more: keys of `tasks` that belong to another source (`tasks.task_checks`), what a model's
shape or the machine rules out (`model_checks`, `rollout_checks`, `actor_checks`). Sections that other commands read, such as
`reward_model` under `train`, stay legal in recipes, which commands share; as overrides of a command that does not read them
they are refused (`check_overrides`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.base.messages import ConfigError, show
from megatron_rl.config.algorithm_checks import reward_columns
from megatron_rl.config.presets import get_preset
from megatron_rl.config.schema import Config, RewardConfig, TaskConfig


@dataclass(frozen=True)
class Only:
    """When a key has an effect.

    Attributes:
        when: whether it has, of the recipe and the name of the key's entry (`rewards.<name>`; else empty).
        otherwise: why not, in words after "does nothing".
        remedy: what to do.
        by: the keys that decide it; a later source that sets one of them switches the key off. Empty: no source does.
    """

    when: Callable[[Config, str], bool]
    otherwise: str
    remedy: str
    by: tuple[str, ...] = ()


def _with(section: str, key: str, is_on: Callable[[Any], bool], off: str, on: str) -> Only:
    """Only with a value of another key, `section.key`."""
    whole = f"{section}.{key}"

    def when(config: Config, _: str) -> bool:
        return is_on(_at(config, whole))

    return Only(when, f"while `{whole}` is {off}", f"set {whole}{on}, or remove it", (whole,))


def _entries() -> Iterator[tuple[str, Only]]:
    for optimizer in ("actor.optimizer", "sft.optimizer", "reward_model.optimizer"):
        to = "=linear or cosine"
        yield f"{optimizer}.min_lr", _with(optimizer, "schedule", lambda it: it != "constant", "constant", to)
    yield "actor.recompute_layers", _with("actor", "recompute", lambda it: it == "full", "not full", "=full")
    selective = _with("actor", "recompute", lambda it: it == "selective", "not selective", "=selective")
    yield "actor.recompute_modules", selective
    yield "algorithm.overlong.weight", _with("algorithm.overlong", "share", lambda it: it > 0, "0", "")
    yield "algorithm.kl.estimator", _with("algorithm.kl", "coef", lambda it: it > 0, "0", "")
    yield "algorithm.kl.reward_estimator", _with("algorithm.kl", "reward_coef", lambda it: it > 0, "0", "")
    yield "algorithm.correction.cap", _with("algorithm.correction", "weight", lambda it: it != "none", "none", "")
    yield "algorithm.resample_ahead", _with("algorithm", "resample_rounds", lambda it: it > 0, "0", "")
    yield "algorithm.gamma", _with("algorithm", "credit", lambda it: it == "turn", "rollout", "=turn")
    yield "rollout.fp8_skip", _with("rollout", "fp8", lambda it: it != "none", "none", "=blockwise")
    for name in ("sft_every", "keep", "keep_best", "best", "asynchronous", "on_failure"):
        yield f"checkpoint.{name}", _with("checkpoint", "every", lambda it: it > 0, "0", "")
    yield "trainer.eval_top_p", _with("trainer", "eval_temperature", lambda it: it > 0, "0 (greedy)", "")
    for name in ("sets", "limit", "arguments", "handler"):
        yield f"evaluation.harness.{name}", _with("evaluation.harness", "name", lambda it: it is not None, "null", "")
    for name in ("default_minutes", "phases", "first_time_minutes"):
        yield f"watchdog.{name}", _with("watchdog", "enabled", bool, "false", "=true")
    yield (
        "launch.endpoint_minutes",
        Only(
            lambda config, _: any(
                ":" in reward.reward or "urls" in reward.params for reward in config.rewards.values()
            ),
            "where no reward asks a server",
            "remove it",
            ("rewards",),
        ),
    )
    yield (
        "tasks.train.<name>.weight",
        Only(
            lambda config, _: len(config.tasks.train) > 1,
            "where there is one train task: it is a share of the training prompts",
            "remove it",
            ("tasks.train",),
        ),
    )
    yield (
        "rewards.<name>.weight",
        Only(
            lambda config, name: name in reward_columns(config),
            "where the column is not computed: it has when_needed, and the estimator does not ask for it",
            "set when_needed to false, or remove it",
        ),
    )


_STEPS = tuple(f"trainer.{name}" for name in ("steps", "prompts_per_step", "minibatches", "epochs"))


ONLY: Mapping[str, Only] = dict(_entries())
_DEFAULTS = Config(run_dir="")


def check_inactive(config: Config, command: str) -> Iterator[str]:
    """Yields a sentence per key that is not as by default and does nothing. Plug-ins must be loaded."""
    for key, value, only in inactive(config):
        yield f"`{key}` ({show(value)}) does nothing {only.otherwise}; {only.remedy}"
    if command == "train" and config.sft.wanted and config.sft.eval_every:
        yield (
            f"`sft.eval_every` ({config.sft.eval_every}) does nothing in the warm-up of `train`: it is for the command sft; "
            "set it to 0"
        )


# Keys and sections that a command does not read, and what it reads instead, if anything.
_OF_EVALUATE = {"evaluation.endpoint": "", "evaluation.harness": ""}
_NOT_READ = {
    "train": {"reward_model": "", **_OF_EVALUATE},
    "sft": {
        **_OF_EVALUATE,
        "actor.optimizer": "sft.optimizer",
        "reward_model": "sft",
        "algorithm": "",
        "launch.generators": "",
        **dict.fromkeys(_STEPS, "sft.steps"),
    },
    "reward-model": {
        **_OF_EVALUATE,
        "actor.optimizer": "reward_model.optimizer",
        "sft": "reward_model",
        "algorithm": "",
        "rewards": "",
        "launch.generators": "",
        **dict.fromkeys(_STEPS, "reward_model.steps"),
    },
}
_READ = ("actor.optimizer.distributed",)  # how gradients are summed, in every stage


def check_overrides(overrides: Sequence[str], command: str) -> None:
    """Raises ConfigError, a line for each, on overrides of keys that this command does not read."""
    unread = []
    for override in overrides:
        key = override.partition("=")[0]
        for section, instead in _NOT_READ.get(command, {}).items():
            if key not in _READ and (key == section or key.startswith(f"{section}.")):
                own = f"; its own is {instead}{key.removeprefix(section)}" if instead else ""
                unread.append(f"override `{key}`: {command} does not read it{own}; leave it out")
    if unread:
        raise ConfigError("\n".join(unread))


def inactive(config: Config, *, switched: bool = False) -> Iterator[tuple[str, object, Only]]:
    """Key, value and condition of what is not as by default and does nothing. `switched`: of what a source can switch off."""
    for pattern, only in ONLY.items():
        if only.by or not switched:
            for key, name, value in _values(config, pattern):
                if value not in _defaults(config, pattern) and not only.when(config, name):
                    yield key, value, only


def _values(config: Config, pattern: str) -> list[tuple[str, str, object]]:
    """Key, entry's name and value of all that a pattern stands for."""
    if "<name>" not in pattern:
        return [(pattern, "", _at(config, pattern))]
    before, after = pattern.split(".<name>.")
    return [(f"{before}.{name}.{after}", name, _at(entry, after)) for name, entry in _at(config, before).items()]


def _defaults(config: Config, pattern: str) -> list[object]:
    """The schema's default, and the preset's where it has one."""
    if "<name>" in pattern:
        before, after = pattern.split(".<name>.")
        return [_at(RewardConfig(reward="") if before == "rewards" else TaskConfig(source=""), after)]
    found = [_at(_DEFAULTS, pattern)]
    of_preset: object = {"algorithm": get_preset(config.algorithm.preset)}
    for part in pattern.split("."):
        of_preset = of_preset.get(part) if isinstance(of_preset, dict) else None
    return found if of_preset is None else [*found, of_preset]


def _at(section: object, key: str) -> Any:
    for part in key.split("."):
        section = getattr(section, part)
    return section
