"""vLLM's LoRA with adapters that are tensors in memory, where its own requests load them from folders. Written for 0.32.

The engine holds one set of adapters, and every request names it. A request whose adapters are loaded reads no folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

_NUMBER = 1  # vLLM's of the adapters


def request() -> LoRARequest:
    """The name of the engine's adapters in a request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("actor", _NUMBER, "from the actor")


def load(llm: LLM, adapters: Iterable[tuple[str, Tensor]], rank: int, scale: float, modules: list[str]) -> None:
    """Replaces this rank's adapters by (PEFT's name, full tensor) pairs, of which vLLM takes the rank's share.

    Raises:
        RuntimeError: the engine has no layer for an adapter, which vLLM would leave out without a word.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    [worker] = llm.collective_rpc(lambda worker: worker)
    lora = worker.model_runner.lora_manager
    manager = lora._adapter_manager
    # Copies, since vLLM multiplies them by the scale in place.
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in adapters}
    about = PEFTHelper(r=rank, lora_alpha=rank, target_modules=modules)
    about.vllm_lora_scaling_factor = scale
    loaded = LoRAModel.from_lora_tensors(_NUMBER, tensors, about, device="cpu", dtype=lora.lora_config.lora_dtype)
    manager.remove_adapter(_NUMBER)
    manager.add_adapter(loaded)
    if unplaced := sorted(set(loaded.loras) - set(manager.modules)):
        raise RuntimeError(f"vLLM has no layer for {len(unplaced)} of the actor's adapters; the first is {unplaced[0]}")
    manager.activate_adapter(_NUMBER)
