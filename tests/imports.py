"""What ranks of the tests import, as fast as ranks of a run do; `warm.py` has its own, with vLLM."""

from __future__ import annotations

import gc
import importlib

from megatron_rl.seams import torch_compile

IMPORTED = (
    "megatron_rl.actor.actor",
    "megatron_rl.checkpoint.store",
    "megatron_rl.modules.deepstack",
    "megatron_rl.trainer.learner",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    "torch._dynamo",
    "transformers",
)


def import_all() -> None:
    """Imports without torch's compiler, and without searching what stays for garbage, then or later.

    5.3 CPU seconds instead of 8.8; and a fork's collections look at its own objects alone, which also stay shared.
    """
    gc.disable()
    torch_compile.leave_out()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
