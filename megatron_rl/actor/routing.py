"""Which experts each token goes to: taken over from the engine, or from one pass of a micro-batch to its next ones; counted.

Between the pass for the old log-probs and the update the weights change, and with them some tokens' experts: their ratio
then says more about the router than about the policy. Replayed, a token keeps the experts of its first pass (R2 in
Zheng et al. 2025, Stabilizing Reinforcement Learning with LLMs), or has those of the engine that drew it in all passes (R3
there): then the engine's rounding sends none elsewhere either. How much each expert weighs is computed anew, and has a
gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megatron_rl.actor.packing import MicroBatch
from megatron_rl.models import Model
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.seams.megatron import Chunk, routers
from megatron_rl.seams.megatron_moe import BIAS

Chosen = dict[int, Tensor]  # layer, from 1 -> int16 [this rank's tokens, experts per token]


@dataclass(frozen=True)
class Pass:
    """One forward pass of a micro-batch.

    Attributes:
        chosen: the micro-batch's, replayed where it has a layer's and else filled in; None: routed as the weights say.
        counted: bool [this rank's tokens], those whose experts are counted in an update.
        updates: a backward pass follows, which may repeat this one.
    """

    chosen: Chosen | None
    counted: Tensor
    updates: bool


class LayerRouting:
    """One router's choices. In the place of Megatron's `RouterReplay`, whose lists do not know micro-batches or stages."""

    def __init__(self, layer: int, router: nn.Module, replay: bool) -> None:
        self.layer = layer
        self.router = router
        self.load: Tensor | int = 0  # int64 [experts]: tokens that updates sent to each
        self.step_load: Tensor | int = 0  # the same of this optimizer step
        self.given: Pass  # set before each forward pass
        self._now: Pass
        self._repeated: deque[Pass] = deque()
        router.register_forward_pre_hook(self._enter)
        router.register_forward_hook(self._count)
        if replay:
            router.router_replay = self  # type: ignore[assignment]

    def reset(self) -> None:
        """Drops what an update that failed may have left, before each series of micro-batches."""
        self._repeated.clear()
        self.step_load = 0

    def _enter(self, router: nn.Module, inputs: object) -> None:
        """A layer to be computed again runs without gradients first; backward passes come in the order of forward passes."""
        self._now = self._repeated.popleft() if self._repeated and torch.is_grad_enabled() else self.given
        if self._now.updates and not torch.is_grad_enabled():
            self._repeated.append(self._now)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts, [tokens, topk] each; called by Megatron's router."""
        chosen = self._now.chosen
        if chosen is None:
            return choose(scores, topk, num_groups, group_topk)
        if self.layer not in chosen:
            chosen[self.layer] = choose(scores, topk, num_groups, group_topk)[1].to(torch.int16)
        experts = chosen[self.layer].long()
        return scores.gather(1, experts), experts

    def _count(self, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():  # once for each token of an update, also where the layer runs twice
            counts = (output[1] & self._now.counted[:, None]).sum(dim=0)
            self.load, self.step_load = self.load + counts, self.step_load + counts


def as_chosen(experts: np.ndarray, layer: int) -> Tensor:
    """int16 [tokens, experts per token] on the device, of [tokens, layers, experts per token]."""
    return torch.as_tensor(experts[:, layer - 1].astype(np.int16), device=device.device())


def layer_routings(chunks: Sequence[Chunk], replay: bool) -> list[LayerRouting]:
    """The routings of all routers on this rank."""
    return [LayerRouting(layer, router, replay) for chunk in chunks for layer, router in routers(chunk)]


def choices(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    model: Model,
    grid: ProcessGrid,
    sequence_parallel: bool,
) -> list[np.ndarray]:
    """Returns the experts that each token of a batch was routed to in its last pass, on every rank; all of them call it:
    int16 [tokens, layers, experts per token] of every sequence, 0 in layers without experts.

    Args:
        micro_batches: this rank's of the batch, routed with `Pass.chosen`.
        lengths: of the batch's entries, each one sequence.
    """
    assert model.experts is not None
    ends = np.cumsum(lengths)
    # An even number of int16, for what is summed below: one rank has an entry's bits, and all others zeros.
    flat = np.zeros((ends[-1] + ends[-1] % 2, model.dims["layers"], model.experts.top_k), dtype=np.int16)
    for micro in micro_batches if sequence_parallel or grid.tp_rank == 0 else ():
        places = micro.places(lengths, grid.cp, grid.cp_rank)
        if sequence_parallel:
            places = np.split(places, grid.tp)[grid.tp_rank]
        is_token = places >= 0
        for layer, chosen in micro.chosen_experts.items():
            flat[places[is_token], layer - 1] = chosen.cpu().numpy()[is_token]
    grid.sum_array(flat.reshape(-1).view(np.int32))
    return np.split(flat[: ends[-1]], ends[:-1])


def expert_load(routings: Sequence[LayerRouting], layers: Sequence[int], experts: int) -> dict[str, float]:
    """Metrics of how evenly the updates since the last call used the experts of these layers; every rank calls it."""
    counts = _over_ranks({routing.layer - 1: routing.load for routing in routings}, layers, experts)
    forget_expert_load(routings)
    busiest = counts.amax(dim=1) / counts.double().mean(dim=1)
    return {"experts/load": float(busiest.mean()), "experts/load_max": float(busiest.max())}


def forget_expert_load(routings: Sequence[LayerRouting]) -> None:
    for routing in routings:
        routing.load = 0


def is_bias(name: str) -> bool:
    """Whether a tensor of a chunk is the biases by which a router chooses experts: a buffer, which updates may change."""
    return name.endswith(f".{BIAS}")


def update_biases(routings: Sequence[LayerRouting], model: Model, rate: float) -> None:
    """Moves each bias by `rate` after an optimizer step, up where fewer of the step's tokens went than to the mean expert,
    down where more. Nothing at rate 0.

    Wang et al. 2024, Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, algorithm 1. The tokens are those
    that predict a scored one, over all micro-batches and ranks, so no layout and no padding changes it; every rank calls it.
    """
    if not rate:
        return
    layers, experts = sorted(model.expert_layers), model.expert_count
    counts = _over_ranks({routing.layer - 1: routing.step_load for routing in routings}, layers, experts)
    for routing in routings:
        load = counts[layers.index(routing.layer - 1)]
        routing.router.get_buffer(BIAS).add_((load.sum() - experts * load).sign(), alpha=rate)


def _over_ranks(loads: Mapping[int, Tensor | int], layers: Sequence[int], experts: int) -> Tensor:
    """int64 [layers, experts]: this rank's loads by layer, added to those of the others."""
    counts = torch.zeros(len(layers), experts, dtype=torch.int64, device=device.device())
    for layer, load in loads.items():
        counts[layers.index(layer)] = load
    torch.distributed.all_reduce(counts)
    return counts
