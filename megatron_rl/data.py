"""The few nouns that cross packages. Shapes: n prompts, m rollouts per prompt (largest group), k named rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Sample:
    """One prompt with everything a reward may want to know about it."""

    id: str  # "<task>/<index>", unique within a run; groups are formed by it
    task: str  # the key under `tasks.train` or `tasks.eval`
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    prompt_ids: list[int]  # what the engine is given; never re-tokenised later
    answer: Any = None
    tool_calls: list[dict[str, Any]] | None = None  # gold calls, {"name": str, "parameters": dict}
    needs_response: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    demonstration: str | None = None  # SFT target text, where the task has one

    def as_mapping(self) -> dict[str, Any]:
        """What a reward function receives: `prompt`, `answer`, `tool_calls`, `needs_response`, `metadata`."""
        keys = ("prompt", "answer", "tool_calls", "needs_response", "metadata")
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None}


@dataclass
class Rollout:
    """One sampled response, token by token as the engine drew it."""

    sample_id: str
    index: int  # 0 .. group_size - 1 within its prompt
    prompt_ids: np.ndarray  # int64 [prompt tokens]
    response_ids: np.ndarray  # int64 [response tokens], end-of-sequence token included where it was drawn
    logprobs: np.ndarray  # float32 [response tokens]: log-prob of each token under the engine's sampling distribution
    finish_reason: str  # stop | length
    text: str = ""
    rewards: dict[str, float] = field(default_factory=dict)  # one number per reward column

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class RewardTable:
    """Rewards of one step's whole batch, over all data-parallel ranks; what every advantage estimator reads.

    Args:
        values: float tensor [n, m, k]. Entries where `valid` is False are ignored, whatever they hold.
        names: the k column names.
        valid: bool tensor [n, m]; False where a rollout does not exist (ragged groups). None: all exist.
        weights: weight per column name, 1.0 where absent.
        lengths: response lengths in tokens, [n, m]; needed for statistics over tokens.
        greedy: rewards of the greedy rollout, [n, k]; needed by ReMax.

    Raises:
        ValueError: on shapes that do not agree, an unknown name in `weights`, or non-finite valid values.
    """

    values: Tensor
    names: tuple[str, ...]
    valid: Tensor | None = None
    weights: Mapping[str, float] | None = None
    lengths: Tensor | None = None
    greedy: Tensor | None = None

    def __post_init__(self) -> None:
        self.names = tuple(self.names)
        if self.values.dim() != 3 or self.values.shape[2] != len(self.names):
            raise ValueError(
                f"values must be [n, m, k] with k = {len(self.names)} names, not shape {tuple(self.values.shape)}"
            )
        n, m, k = self.values.shape
        if not self.values.is_floating_point():
            self.values = self.values.double()
        if self.valid is None:
            self.valid = torch.ones(n, m, dtype=torch.bool, device=self.values.device)
        for name, tensor, shape in (
            ("valid", self.valid, (n, m)),
            ("lengths", self.lengths, (n, m)),
            ("greedy", self.greedy, (n, k)),
        ):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape} to go with values, not {tuple(tensor.shape)}")
        unknown = set(self.weights or {}) - set(self.names)
        if unknown:
            raise ValueError(f"weights for unknown rewards {sorted(unknown)}; the table has {list(self.names)}")
        if not torch.isfinite(self.values[self.valid]).all():
            raise ValueError("a reward is NaN or infinite; mark rollouts that could not be scored as not valid")

    @property
    def mask(self) -> Tensor:
        """`valid`, never None: bool [n, m]."""
        assert self.valid is not None
        return self.valid

    def column(self, name: str) -> Tensor:
        """Raw values of one reward, [n, m]."""
        if name not in self.names:
            raise ValueError(f"no reward column {name!r}; the table has {list(self.names)}")
        return self.values[:, :, self.names.index(name)]

    def weight(self, name: str) -> float:
        return float((self.weights or {}).get(name, 1.0))


@dataclass
class TrainBatch:
    """The rollouts of one step, ready for the update: parallel lists, one entry per rollout that is trained on.

    Token tensors cover the response only, aligned with `response_ids`.
    """

    prompt_ids: list[np.ndarray]  # int64
    response_ids: list[np.ndarray]  # int64
    rollout_logprobs: list[np.ndarray]  # float32, from the engine
    advantages: np.ndarray  # float32 [rollouts]
    group: np.ndarray  # int64 [rollouts]: index of the prompt within the step

    def __len__(self) -> int:
        return len(self.prompt_ids)
