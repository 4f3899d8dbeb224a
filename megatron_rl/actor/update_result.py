"""What goes into an update of the actor, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.algorithms.metrics import Metrics

# (number of the micro-batch, log-probs, entropy or None) -> (loss, metrics). The loss is this micro-batch's share of the
# minibatch's loss, already divided by the whole minibatch's denominators. All tensors are float32 [scored tokens].
LossFunction = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Metrics]]
Scores = tuple[Tensor, Tensor | None]  # of a micro-batch: log-probs, and entropies where they are asked for


@dataclass
class UpdateResult:
    """One optimizer step: the loss's metrics over the whole minibatch, on every rank."""

    metrics: Metrics
    grad_norm: float
    learning_rate: float
    gradient_variance: float | None = None  # where it was measured, of two parts or more
    gradient_parts: int = 0  # micro-batches that it was measured over
