"""Estimators and gradient weights by name: built-in ones, and the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rl.algorithms.groups import Groups
from megatron_rl.config.methods import (
    ESTIMATOR,
    WEIGHT,
    Needs,
    check_method,
    get_method,
    list_methods,
    method_needs,
    register_function,
)
from megatron_rl.data import RewardTable

Implementation = TypeVar("Implementation", bound=Callable[..., Any])

_IMPLEMENTATIONS: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass
class Estimate:
    """What an advantage estimator makes of a reward table.

    Attributes:
        advantages: [n, m], 0 where invalid; float64 for a float64 table, otherwise float32.
        metrics: numbers for the step's log.
        clip_range: (eps_low, eps_high) that replaces the gradient weight's own bounds for this batch, or None.
        group: quantities per prompt, [n] each.
    """

    advantages: Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    clip_range: tuple[float, float] | None = None
    group: dict[str, Tensor] = field(default_factory=dict)


class AdvantageEstimator:
    """Rewards to advantages; made by `make_advantage_estimator`.

    Attributes:
        name: the method's name.
        params: its parameters, complete.
        needs: what it needs from the batch.
    """

    def __init__(self, name: str, params: Mapping[str, Any]) -> None:
        self.name = name
        self.params = check_method(ESTIMATOR, name, params)
        self.needs: Needs = method_needs(ESTIMATOR, name, self.params)
        implementation = _IMPLEMENTATIONS[ESTIMATOR, name]
        self._state: Any = implementation(**self.params) if inspect.isclass(implementation) else None
        self._function = implementation

    def __call__(self, table: RewardTable) -> Estimate:
        """Advantages of the whole batch of a step, over all data-parallel ranks.

        Raises:
            ValueError: naming what the table lacks for this method.
        """
        self._check(table)
        groups = Groups(table)
        result = self._state(groups) if self._state is not None else self._function(groups, **self.params)
        if isinstance(result, Tensor):
            result = Estimate(result)
        if result.advantages.shape != groups.valid.shape:
            shape, wanted = tuple(result.advantages.shape), tuple(groups.valid.shape)
            raise ValueError(f"{self.name} returned advantages of shape {shape}, not {wanted}")
        dtype = torch.float64 if table.values.dtype == torch.float64 else torch.float32
        advantages = torch.where(groups.valid, result.advantages, 0.0).to(dtype)
        if not torch.isfinite(advantages).all():
            raise ValueError(f"{self.name} returned advantages that are NaN or infinite")
        result.advantages = advantages
        return result

    def _check(self, table: RewardTable) -> None:
        counts = table.mask.sum(1)
        present = counts > 0
        too_small = torch.nonzero(present & (counts < self.needs.group_size)).flatten()
        if len(too_small):
            at = int(too_small[0])
            raise ValueError(
                f"{self.name} needs at least {self.needs.group_size} rollouts per prompt; "
                f"prompt {at} has {int(counts[at])}"
            )
        if int(present.sum()) < self.needs.prompts:
            raise ValueError(f"{self.name} needs at least {self.needs.prompts} prompts; there is {int(present.sum())}")
        for column in self.needs.columns:
            table.column(column)
        if len(set(table.names) - set(self.needs.columns)) < self.needs.other_columns:
            raise ValueError(
                f"{self.name} needs {self.needs.other_columns} reward column(s) besides "
                f"{', '.join(self.needs.columns)}; the table has {list(table.names)}"
            )
        if self.needs.greedy and table.greedy is None:
            raise ValueError(
                f"{self.name} needs the rewards of a greedy rollout per prompt: RewardTable(greedy=[n, k])"
            )
        if self.needs.lengths and table.lengths is None:
            raise ValueError(f"{self.name} over tokens needs response lengths: RewardTable(lengths=[n, m])")

    def state_dict(self) -> dict[str, Any]:
        """What must be saved with a checkpoint; empty where the method has no memory."""
        return self._state.state_dict() if self._state is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict()`. ValueError if the state is of another method."""
        if self._state is not None:
            self._state.load_state_dict(state)
        elif state:
            raise ValueError(f"{self.name} has no state, but the checkpoint holds {sorted(state)}")

    def __repr__(self) -> str:
        return _call(self.name, self.params)


class GradientWeight:
    """F(w, A) of DGPO's Eq. 1; made by `make_gradient_weight`.

    Attributes:
        name: the method's name.
        params: its parameters, complete.
    """

    def __init__(self, name: str, params: Mapping[str, Any]) -> None:
        self.name = name
        self.params = check_method(WEIGHT, name, params)
        self._function = _IMPLEMENTATIONS[WEIGHT, name]

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """(eps_low, eps_high), or None where the method has no bounds."""
        if {"eps_low", "eps_high"} <= set(self.params):
            return self.params["eps_low"], self.params["eps_high"]
        return None

    def __call__(self, log_ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float] | None = None) -> Tensor:
        """The weight of each token's A * grad log pi.

        Args:
            log_ratio: log pi - log pi_old, any shape; computed in at least float32.
            advantages: same shape.
            clip_range: (eps_low, eps_high) for this batch in place of the method's own (AWPO Eq. 24).

        Returns:
            Same shape and dtype as `log_ratio`, without gradient, finite for every finite input.
        """
        params = dict(self.params)
        if clip_range is not None and self.clip_range is not None:
            params["eps_low"], params["eps_high"] = clip_range
        with torch.no_grad():
            precise = torch.promote_types(log_ratio.dtype, torch.float32)
            weight = self._function(log_ratio.detach().to(precise), advantages.detach().to(precise), **params)
            if log_ratio.dtype != precise:
                weight = weight.clamp(max=torch.finfo(log_ratio.dtype).max)
            return weight.to(log_ratio.dtype)

    def __repr__(self) -> str:
        return _call(self.name, self.params)


def _call(name: str, params: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in params.items())})"


def make_advantage_estimator(name: str, **params: Any) -> AdvantageEstimator:
    """An advantage estimator by name. ValueError, naming the nearest, on an unknown name or parameter."""
    return AdvantageEstimator(name, params)


def make_gradient_weight(name: str, **params: Any) -> GradientWeight:
    """A gradient weight by name. ValueError, naming the nearest, on an unknown name or parameter."""
    return GradientWeight(name, params)


def list_advantage_estimators() -> tuple[str, ...]:
    return list_methods(ESTIMATOR)


def list_gradient_weights() -> tuple[str, ...]:
    return list_methods(WEIGHT)


def implements(kind: str, name: str) -> Callable[[Implementation], Implementation]:
    """Ties a function (or a class with state) to its entry in the catalogue; their parameters must be the same."""

    def tie(implementation: Implementation) -> Implementation:
        keywords = tuple(
            parameter.name
            for parameter in inspect.signature(implementation).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        )
        if keywords != tuple(get_method(kind, name).params):
            raise TypeError(f"{name} takes {keywords}; the catalogue says {tuple(get_method(kind, name).params)}")
        _IMPLEMENTATIONS[kind, name] = implementation
        return implementation

    return tie


def advantage_estimator(
    name: str | None = None,
    *,
    group_size: int = 1,
    prompts: int = 1,
    columns: tuple[str, ...] = (),
    greedy: bool = False,
    lengths: bool = False,
) -> Callable[[Implementation], Implementation]:
    """Registers a function of `Groups` (and keyword-only parameters) as an advantage estimator.

    The function returns advantages [n, m], or an `Estimate`. The arguments say what it needs from the batch; recipes
    that cannot provide it are refused when loaded. See docs/algorithms/adding-an-estimator.md.
    """
    needs = Needs(group_size=group_size, prompts=prompts, columns=columns, greedy=greedy, lengths=lengths)
    return _registers(ESTIMATOR, name, needs)


def gradient_weight(name: str | None = None) -> Callable[[Implementation], Implementation]:
    """Registers a function of (log_ratio, advantages), and keyword-only parameters, as a gradient weight.

    It receives float32 or float64 tensors without gradient and returns a tensor of the same shape. With parameters
    `eps_low` and `eps_high` it also follows an estimator's clip range.
    """
    return _registers(WEIGHT, name, Needs())


def _registers(kind: str, name: str | None, needs: Needs) -> Callable[[Implementation], Implementation]:
    def register(function: Implementation) -> Implementation:
        known = name or function.__name__
        register_function(kind, function, known, needs)
        _IMPLEMENTATIONS[kind, known] = function
        return function

    return register
