"""Builds actors in given layouts with the product's own code and prints what they take, as JSON; no other process is needed.

A world of any size is pretended by torch's `fake` backend: building a model and its optimizer sends no tensor anywhere.
Called by `test_planner.py` in a process of its own: `python -m tests.recipes.built CASES`, cases as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.actor import build
from megatron_rl.config.actor import ActorConfig, OptimizerConfig, ParallelConfig
from megatron_rl.models import model_of
from megatron_rl.runtime import device
from megatron_rl.seams.megatron import optimizer_parts

_new_group = dist.new_group


def _fake_group(*args: Any, **kwargs: Any) -> Any:
    """Also the groups for which Megatron asks for gloo."""
    return _new_group(*args, **{**kwargs, "backend": "fake"})


def sizes(case: dict[str, Any], rank: int) -> dict[str, int]:
    """Parameters, gradient bytes and optimizer bytes of one rank of the case's world."""
    from megatron.core import parallel_state

    parallel = ParallelConfig(**case["parallel"])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["world"])
    try:
        with device.megatron():
            parallel_state.initialize_model_parallel(
                parallel.tensor,
                parallel.pipeline,
                parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
                expert_model_parallel_size=parallel.expert,
                expert_tensor_parallel_size=parallel.expert_tensor,
            )
            model = model_of(case["model"])
            dtype = build.DTYPES[case["dtype"]]
            chunks = build.build_model(model.family, model.description, ActorConfig(parallel=parallel), dtype)
            parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
            wrapped = build.wrap_for_training(chunks, distributed_optimizer=True, param_gather_fp8=False)
            optimizer = build.build_optimizer(wrapped, OptimizerConfig(), dtype, None)
            buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            gradients = sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in buffers)
        state = 0
        for part in optimizer_parts(optimizer):
            own = [p for group in part.optimizer.param_groups for p in group["params"]]
            if dtype is torch.bfloat16:  # fp32 master copies; in fp32 the parameters themselves are updated
                state += sum(p.numel() * p.element_size() for p in own)
            moments = (part.optimizer.state[p][name] for p in own for name in ("exp_avg", "exp_avg_sq"))
            state += sum(moment.numel() * moment.element_size() for moment in moments)
        return {"parameters": parameters, "gradients": gradients, "optimizer": state}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.new_group = _fake_group
    found = [[sizes(case, rank) for rank in case["ranks"]] for case in json.loads(sys.argv[1])]
    print("RESULT " + json.dumps(found))
