"""Mixtures of experts of Megatron-Core: what is private of them beside `megatron`. Written for 0.16.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_rl.seams import check_parameters
from megatron_rl.seams.megatron import Chunk

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer


def forget_routing(chunk: Chunk) -> None:
    """Makes each mixture of experts drop its routing after a forward pass, and after one that is computed again. Its
    dispatcher would hold it until the next, and by its graph a recomputed layer's input and that input's gradient: two hidden
    states per token and layer."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    check_parameters(MoELayer.postprocess, "self output shared_expert_output")

    def drop_after(module: MoELayer) -> Callable[..., Tensor]:
        compute = module.postprocess

        def postprocess(output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
            output = compute(output, shared_expert_output)
            for name in ("probs", "routing_map", "reversed_local_input_permutation_mapping"):
                setattr(module.token_dispatcher, name, None)
            return output

        return postprocess

    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.postprocess = drop_after(module)
