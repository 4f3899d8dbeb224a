"""Rewards by name.

A reward is a callable `(completion, sample) -> number`, or `-> {part: number}` for several, whose names are then in its
attribute `columns`. The sample is a mapping with the keys of `Sample.as_mapping` (`prompt`, `answer`, `tool_calls`,
`needs_response`, `metadata`) and, in a run, also `finish_reason` (`stop` or `length`) and `num_tokens` (length of the
response). Further attributes: with `may_abstain` it may return None, no value for this rollout; `check_sample`, a function of
the sample, raises ValueError where that lacks what the reward needs, and a run asks it about all of them before it starts;
`doubts`, a function of (id, sample) pairs, returns warnings that rank 0 prints then.

A factory turns a recipe's parameters into such a callable; it imports nothing heavy and raises ValueError on a bad parameter,
so that recipes are checked by making their rewards.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from megatron_rl.names import unknown_name
from megatron_rl.parameters import check_types
from megatron_rl.user_code import is_module_name, load_file

Score = float | dict[str, float] | None


class Reward(Protocol):
    def __call__(self, completion: str, sample: Mapping[str, Any]) -> Score: ...


Factory = Callable[..., Reward]

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
        return factory(**params)
    except OSError as error:  # a path that cannot be looked at
        raise ValueError(f"{name}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


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


def real(name: str, value: Any, low: float = float("-inf"), high: float = float("inf")) -> float:
    """A parameter that must be a number in [low, high]. ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} = {value!r}, must be a number from {low} to {high}")
    return float(value)


def whole(name: str, value: Any, low: int = 0) -> int:
    """A parameter that must be a whole number of at least `low`. ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} = {value!r}, must be a whole number of at least {low}")
    return value


def choice(name: str, value: Any, options: tuple[str, ...]) -> str:
    """A parameter that must be one of a few words. ValueError otherwise."""
    if value not in options:
        raise ValueError(f"{name} = {value!r}, must be one of {', '.join(options)}")
    return str(value)


def flag(name: str, value: Any) -> bool:
    """A parameter that must be true or false. ValueError otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}, must be true or false")
    return value


def stopped(sample: Mapping[str, Any]) -> bool:
    """Whether the response ended by itself; it counts as ended where nobody says (a call outside a run)."""
    return sample.get("finish_reason", "stop") == "stop"
