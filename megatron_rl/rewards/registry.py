"""Rewards by name.

A factory makes a reward from a recipe's parameters: one of the kinds in `kinds.py`, or a plain function of completion and
sample, which becomes an `InlineReward`. It imports nothing heavy and raises ValueError on a bad parameter, so recipes are
checked by making their rewards. Parameters are checked against the factory's annotations (`base/typed_params.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.base.messages import errors_named, unknown_name
from megatron_rl.base.plugins import load_function
from megatron_rl.base.typed_params import check_types
from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.kinds import CALL_SECONDS, InlineReward, PooledReward, Reward, ScoreFunction

Factory = Callable[..., ScoreFunction]


@dataclass(frozen=True)
class _Entry:
    """A factory, and the dataclasses that it takes as first arguments; a recipe gives their fields as parameters."""

    factory: Factory
    settings: tuple[type, ...] = ()

    def parameters(self) -> dict[str, inspect.Parameter]:
        own = list(inspect.signature(self.factory).parameters.items())[len(self.settings) :]
        return dict(own + [item for kind in self.settings for item in inspect.signature(kind).parameters.items()])

    def make(self, params: Mapping[str, object]) -> ScoreFunction:
        arguments, first = dict(params), []
        for kind in self.settings:
            fields = {key: arguments.pop(key) for key in inspect.signature(kind).parameters if key in arguments}
            check_types(kind, fields)
            first.append(kind(**fields))
        check_types(self.factory, arguments)
        return self.factory(*first, **arguments)


_ENTRIES: dict[str, _Entry] = {}


def register_reward(name: str, *settings: type) -> Callable[[Factory], Factory]:
    """Decorator: make a factory available under `name`. ValueError if the name is taken.

    Args:
        settings: dataclasses whose fields are parameters too; the factory takes an instance of each, first.
    """

    def register(factory: Factory) -> Factory:
        if name in _ENTRIES:
            raise ValueError(f"there is a reward {name!r} already")
        _ENTRIES[name] = _Entry(factory, settings)
        return factory

    return register


def list_rewards() -> tuple[str, ...]:
    """Names of the registered rewards, sorted."""
    return tuple(sorted(_ENTRIES))


def make_reward(name: str, **params: object) -> Reward:
    """The reward of a registered name, or a user's own: `package.module:factory` or `path/to/file.py:factory`.

    Raises:
        ValueError: an unknown name or parameter (naming the nearest), or a parameter the reward refuses.
    """
    entry = _Entry(load_function(name, "reward")) if ":" in name else _ENTRIES.get(name)
    if entry is None:
        raise ValueError(f"{unknown_name('reward', name, _ENTRIES)} (a reward of your own is written module:factory)")
    parameters, kinds = entry.parameters(), {parameter.kind for parameter in entry.parameters().values()}
    for key in params:
        if key not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(f"{name}: {unknown_name('parameter', key, parameters)}")
    for key, parameter in parameters.items():
        takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not takes_any and key not in params:
            raise ValueError(f"{name}: the parameter {key!r} is missing")
    try:
        return _as_reward(entry.make(params))
    except OSError as error:  # a path that cannot be read
        raise ValueError(f"{name}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _as_reward(made: ScoreFunction) -> Reward:
    """A factory's result as a reward. A user's function declares by its attributes (docs/rewards/your-own.md)."""
    if isinstance(made, Reward):
        return made
    if not callable(made):
        raise ValueError(f"the factory returned {made!r}, must be a function of completion and sample")
    names = ("columns", "bounds", "may_abstain", "per_token", "check_tokenizer", "check_sample", "doubts", "remarks")
    declared = {name: getattr(made, name) for name in names if hasattr(made, name)}
    if not getattr(made, "concurrent", False):
        return InlineReward(made, **declared)
    seconds = getattr(made, "timeout_seconds", CALL_SECONDS)
    if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0.01):
        raise ValueError(f"its attribute timeout_seconds = {seconds!r}, must be a number of at least 0.01, or None")
    return PooledReward(made, seconds, **declared)


def check_rewards(rewards: Mapping[str, RewardConfig]) -> dict[str, Reward]:
    """All rewards of the section, by column name; no process is started and nothing heavy imported.

    Raises:
        ValueError: naming the key and the nearest known name.
    """
    made: dict[str, Reward] = {}
    for name, config in rewards.items():
        with errors_named(f"rewards.{name}"):
            made[name] = make_reward(config.reward, **config.params)
    columns = {column: name for name, reward in made.items() for column in columns_of(name, reward)}
    for name, config in rewards.items():
        if config.condition is None:
            continue
        key, other = f"rewards.{name}.condition", config.condition.column
        if other not in columns:
            raise ValueError(f"{key}.column: {unknown_name('reward column', other, columns)}")
        if made[columns[other]].per_token:
            raise ValueError(f"{key}.column = {other!r} has one number per token; a condition needs one per rollout")
        if columns[other] == name:
            raise ValueError(f"{key}.column = {other!r}: a reward cannot depend on itself")
        if rewards[columns[other]].when_needed and not config.when_needed:
            raise ValueError(f"{key}.column = {other!r}: that column is not always computed; drop its when_needed")
    return made


def columns_of(name: str, reward: Reward) -> tuple[str, ...]:
    """Column names of a reward: its own, or one per part that it declares."""
    return (name,) if reward.columns is None else tuple(f"{name}.{part}" for part in reward.columns)
