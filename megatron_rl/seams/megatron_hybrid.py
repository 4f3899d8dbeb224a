"""Megatron-Core's place for an optimizer of one's own: that of its `HybridDeviceOptimizer`. Written for 0.19.2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import optimizer as optimizers
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from megatron_rl.seams import check_parameters, replaced

STATE = ("master_param", "exp_avg", "exp_avg_sq")  # names that the distributed optimizer reads and writes
MADE_WITH = (
    "params offload_fraction cpu_optimizer_cls gpu_optimizer_cls param_update_in_fp32 pin_cpu_grads pin_cpu_params "
    "overlap_cpu_optimizer_d2h_h2d kwargs"
)
DECOUPLED = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
LOADED = "_sync_hdo_state_to_sub_optimizers"  # it calls this after it has put a checkpoint's tensors into the state


class HostOptimizer(HybridDeviceOptimizer, torch.optim.AdamW):
    """Holds fp32 masters and moments in host memory from the start; `step` is what a subclass adds.

    Megatron's distributed optimizer makes it twice: of all weights, and then of this rank's shards of them, which alone get a
    state (`initialize_state`). `decoupled_grad` of a shard is its gradient where it was summed; after `step` the shard holds
    the new weights. Megatron's own class has no state before its first step, takes a step on random gradients to be loaded
    into, and moves only what CUDA holds.
    """

    store_param_remainders = False  # masters are whole

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        **_: object,
    ) -> None:
        torch.optim.AdamW.__init__(self, params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does, which refuses the distributed optimizer's views of weights in fp32."""
        self.param_groups.append(self.defaults | param_group)

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """Whose `step` in the state is the number that goes into a checkpoint."""
        return [self]

    def initialize_state(self, parameter: Tensor, store_param_remainders: bool) -> None:
        """The master is the weight, moments are 0. By the name that Transformer Engine's Adam has for it."""
        if parameter.is_meta:  # memory that nothing touches, and so none
            state = {name: torch.empty(parameter.shape) for name in STATE}
        else:
            master = _on_host(parameter)
            state = {STATE[0]: master, **{name: torch.zeros_like(master) for name in STATE[1:]}}
        self.state[parameter] = {**state, "step": torch.zeros(())}

    def update_fp32_param_by_new_param(self) -> None:
        for parameter, state in self.state.items():
            state[STATE[0]].copy_(parameter.detach())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the number of steps, which is left out before the first. The tensors of the state follow on their own; torch
        would make them of the weights' type, on the weights' device."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(float(loaded.get("step") or 0))

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Does nothing: loaded state is views of whole tensors."""
        for state in self.state.values():
            state |= {name: _on_host(state[name]) for name in STATE}


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in fp32."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


@contextlib.contextmanager
def of_ones_own(config: optimizers.OptimizerConfig, optimizer: type[HostOptimizer]) -> Iterator[None]:
    """While entered, Megatron makes `optimizer`s of this configuration.

    Masters are then the optimizer's, and gradients are read where they were summed. Set in its constructor,
    `use_precision_aware_optimizer` asks for Transformer Engine.
    """
    config.optimizer_cpu_offload = config.use_precision_aware_optimizer = True
    setattr(config, DECOUPLED, True)
    check_parameters(getattr(HybridDeviceOptimizer, LOADED), "self")
    name, new = HybridDeviceOptimizer.__name__, optimizer
    with replaced(optimizers, name, new, MADE_WITH), replaced(distrib_optimizer, name, new, MADE_WITH):
        yield
