"""Rewards by name.

A factory turns a recipe's parameters into a reward: one of the kinds in `kinds.py`, or a plain function of completion and
sample, which becomes an `InlineReward`. It imports nothing heavy and raises ValueError on a bad parameter, so that recipes
are checked by making their rewards. The types of parameters are checked against the factory's annotations (`parameters.py`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from megatron_rl.names import unknown_name
from megatron_rl.parameters import check_types, real
from megatron_rl.rewards.kinds import CALL_SECONDS, InlineReward, PooledReward, Reward, ScoreFunction
from megatron_rl.user_code import is_module_name, load_file

Factory = Callable[..., ScoreFunction]

_FACTORIES: dict[str, Factory] = {}


def register_reward(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a factory available under `name`. ValueError if the name is taken."""

    def register(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise ValueError(f"there is a reward {name!r} already")
        _FACTORIES[name] = factory
        return factory

    return register


def list_rewards() -> tuple[str, ...]:
    """Names of the registered rewards, sorted."""
    return tuple(sorted(_FACTORIES))


def make_reward(name: str, **params: Any) -> Reward:
    """The reward of that name, set up with its parameters.

    Args:
        name: a registered name, or one of your own: `package.module:factory` or `path/to/file.py:factory`.
        params: the factory's keyword parameters.

    Raises:
        ValueError: an unknown name or parameter (naming the nearest), or a parameter the reward refuses.
    """
    factory = _own_factory(name) if ":" in name else _FACTORIES.get(name)
    if factory is None:
        raise ValueError(f"{unknown_name('reward', name, _FACTORIES)} (a reward of your own is written module:factory)")
    signature = inspect.signature(factory)
    for key in params:
        if key not in signature.parameters:
            raise ValueError(f"{name}: {unknown_name('parameter', key, signature.parameters)}")
    for key, parameter in signature.parameters.items():
        if parameter.default is parameter.empty and key not in params:
            raise ValueError(f"{name}: the parameter {key!r} is missing")
    try:
        check_types(factory, params)
        return _as_reward(factory(**params))
    except OSError as error:  # a path that cannot be looked at
        raise ValueError(f"{name}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _as_reward(made: ScoreFunction) -> Reward:
    """A factory's result as a reward. What a user's function declares stands in its attributes (docs/rewards/your-own.md)."""
    if isinstance(made, Reward):
        return made
    if not callable(made):
        raise ValueError(f"the factory returned {made!r}, must be a function of completion and sample")
    names = ("columns", "may_abstain", "check_sample", "doubts")
    declared = {name: getattr(made, name) for name in names if hasattr(made, name)}
    if not getattr(made, "concurrent", False):
        return InlineReward(made, **declared)
    seconds = getattr(made, "timeout_seconds", CALL_SECONDS)
    if seconds is not None:
        seconds = real("its attribute timeout_seconds", seconds, low=0.01)
    return PooledReward(made, seconds, **declared)


def _own_factory(name: str) -> Factory:
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py") and not is_module_name(place):
        raise ValueError(
            f"the reward {name!r} names neither a Python file nor a module; write file.py:factory or module:factory"
        )
    try:
        module = load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(f"cannot load the reward {name!r}: {error}") from error
    if not callable(factory := getattr(module, attribute, None)):
        raise ValueError(f"cannot load the reward {name!r}: {place} has no function {attribute!r}")
    return factory
