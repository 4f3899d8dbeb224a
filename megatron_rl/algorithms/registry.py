"""Estimators and surrogates from the catalogue, ready to use on tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.data.rewards import RewardTable
from megatron_rl.methods import ESTIMATOR, SURROGATE, Estimate, Needs, check_method, get_method, list_methods
from megatron_rl.methods.groups import Groups
from megatron_rl.methods.tokens import RolloutTokens, add_rewards


class Stateful(Protocol):
    """An estimator that remembers something between steps."""

    def __call__(self, groups: Groups) -> Estimate | Tensor: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


class AdvantageEstimator:
    """Rewards to advantages; made by `make_advantage_estimator`. `needs`: what the batch must have."""

    def __init__(self, name: str, params: Mapping[str, object]) -> None:
        self.name = name
        self.params = check_method(ESTIMATOR, name, params)
        method = get_method(ESTIMATOR, name)
        self.needs: Needs = method.needs_with(self.params)
        self._function = method.function
        self._own_params = method.params_of(method.function, self.params)
        self.has_token_part = method.token_part is not None
        self._token_part = method.token_part or add_rewards
        self._token_params = method.params_of(self._token_part, self.params)
        has_state = inspect.isclass(method.function)
        self._state: Stateful | None = self._function(**self._own_params) if has_state else None

    def __call__(self, table: RewardTable) -> Estimate:
        """Advantages of the whole batch of a step, over all data-parallel ranks.

        Raises:
            ValueError: naming what the table lacks for this method.
        """
        if unmet := self.unmet(table):
            raise ValueError("; ".join(unmet))
        groups = Groups(table)
        result = self._state(groups) if self._state is not None else self._function(groups, **self._own_params)
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

    def token_advantages(self, tokens: RolloutTokens) -> Tensor:
        """The token part: one advantage per response token of a rollout, float32 [tokens].

        Raises:
            ValueError: the token part returned another shape, or NaN or infinity.
        """
        advantages = self._token_part(tokens, **self._token_params)
        if advantages.shape != tokens.values.shape[:1]:
            shape, count = tuple(advantages.shape), len(tokens.values)
            raise ValueError(f"the token part of {self.name} returned shape {shape} for {count} tokens")
        if not torch.isfinite(advantages).all():
            raise ValueError(f"the token part of {self.name} returned advantages that are NaN or infinite")
        return advantages.float()

    def unmet(self, table: RewardTable) -> list[str]:
        """Needs of this method that the table does not meet, one sentence each."""
        counts = table.mask.sum(1)
        present = counts.nonzero().flatten()
        smallest = int(present[counts[present].argmin()]) if len(present) else None
        group_size = self.needs.group_size if smallest is None else int(counts[smallest])
        return self.needs.unmet(
            self.name,
            group_size=group_size,
            prompts=len(present),
            columns=table.names,
            greedy=table.greedy is not None,
            lengths=table.lengths is not None,
            smallest=f"prompt {smallest} has {group_size}",
        )

    def state_dict(self) -> dict[str, object]:
        """The state to save with a checkpoint; empty where the method has no memory."""
        return self._state.state_dict() if self._state is not None else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restores `state_dict()`. ValueError if the state is of another method."""
        if self._state is not None:
            self._state.load_state_dict(state)
        elif state:
            raise ValueError(f"{self.name} has no state, but the checkpoint holds {sorted(state)}")

    def __repr__(self) -> str:
        return _call(self.name, self.params)


class Surrogate:
    """F(w, A) of DGPO's Eq. 1; made by `make_surrogate`. `params` are complete."""

    def __init__(self, name: str, params: Mapping[str, object]) -> None:
        self.name = name
        self.params = check_method(SURROGATE, name, params)
        self._method = get_method(SURROGATE, name)

    @property
    def clip_range(self) -> tuple[float, float] | None:
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
        params = self._params_with(clip_range)
        with torch.no_grad():
            precise = torch.promote_types(log_ratio.dtype, torch.float32)
            weight = self._method.function(log_ratio.detach().to(precise), advantages.detach().to(precise), **params)
            if log_ratio.dtype != precise:
                weight = weight.clamp(max=torch.finfo(log_ratio.dtype).max)
            return weight.to(log_ratio.dtype)

    def objective(
        self, log_ratio: Tensor, advantages: Tensor, weight: Tensor, clip_range: tuple[float, float] | None = None
    ) -> Tensor:
        """The objective's value per token: the method's own, or F A. `weight`: F of the same arguments."""
        if self._method.objective is None:
            return weight * advantages
        return self._method.objective(log_ratio, advantages, **self._params_with(clip_range))

    def _params_with(self, clip_range: tuple[float, float] | None) -> dict[str, Any]:
        if clip_range is None or self.clip_range is None:
            return dict(self.params)
        return {**self.params, "eps_low": clip_range[0], "eps_high": clip_range[1]}

    def __repr__(self) -> str:
        return _call(self.name, self.params)


def _call(name: str, params: Mapping[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in params.items())})"


def make_advantage_estimator(name: str, **params: object) -> AdvantageEstimator:
    """An advantage estimator by name. ValueError, naming the nearest, on an unknown name or parameter."""
    return AdvantageEstimator(name, params)


def make_surrogate(name: str, **params: object) -> Surrogate:
    """A surrogate by name. ValueError, naming the nearest, on an unknown name or parameter."""
    return Surrogate(name, params)


def list_advantage_estimators() -> tuple[str, ...]:
    return list_methods(ESTIMATOR)


def list_surrogates() -> tuple[str, ...]:
    return list_methods(SURROGATE)
