"""Mixtures of experts of Megatron-Core: what is private of them beside `megatron`. Written for 0.19.2."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_rl.seams import check_parameters
from megatron_rl.seams.megatron import Chunk, routers

BIAS, FROZEN = "expert_bias", "frozen_expert_bias"  # of a router: the buffer, and what `finalize_model_grads` asks


def forget_routing(chunk: Chunk) -> None:
    """Makes each mixture of experts drop its routing after a forward pass, and after one that is computed again. Its
    dispatcher would hold it until the next, and by its graph a recomputed layer's input and that input's gradient: two hidden
    states per token and layer."""
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


def keep_biases_of_experts(chunk: Chunk) -> None:
    """Makes each router's bias float32, whatever the weights are, and leaves it to us to change it.

    Megatron-Core makes it so in the first forward pass, when a bias that was loaded before has lost digits. It would change
    the biases in `finalize_model_grads`, also where the step fails afterwards, by counts that include tokens of padding.
    """
    for _, router in routers(chunk):
        if router.enable_expert_bias:
            router.register_buffer(BIAS, router.get_buffer(BIAS).float())
            setattr(router, FROZEN, True)
