"""Imports of every rank of a run, in the environment in which a rank does: for the process that forks ranks."""

from __future__ import annotations

import gc
import importlib
import os

from megatron_rl.config import validate
from megatron_rl.seams.known_warnings import quiet_known_warnings

_MODULES = (
    "megatron_rl.modules.gpt",
    "megatron_rl.trainer.rank.program",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "transformers",
)
_OF_VLLM = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.core.sched.scheduler",
)


def import_all() -> None:
    """Imports all that a rank will need, before there is a thread, and without a use of CUDA: torch and vLLM ask NVML how
    many GPUs there are."""
    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_COMPILE_THREADS"):  # the second: no pool of processes
        os.environ.setdefault(name, "1")  # as vLLM does, but before torch is imported
    quiet_known_warnings()
    gc.disable()  # a million objects, none of them garbage
    from megatron_rl.rollout import environment
    from megatron_rl.runtime import device
    from megatron_rl.seams import torch_compile

    environment.prepare()
    torch_compile.leave_out()
    validate.prepare()
    for module in _MODULES:
        importlib.import_module(module)
    with torch_compile.left_out_of_vllm():
        worker = "vllm.v1.worker.gpu_worker" if device.has_gpu() else "megatron_rl.seams.vllm_cpu_worker"
        for module in (*_OF_VLLM, worker):
            importlib.import_module(module)
