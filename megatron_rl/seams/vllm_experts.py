"""vLLM: the experts that each token of a response went to (`enable_return_routed_experts`). Written for 0.32.

vLLM's routers report their choices to a connector, which keeps them per block of the prefix cache: tokens of a prompt that
are not computed again have theirs, too. Two things are missing. The connector answers on the first rank of a tensor-parallel
group only, and under the external launcher every rank schedules for itself. And on a CPU no runner calls it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_rl.seams import check_parameters, replaced

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_input_batch import InputBatch

# Of vllm.distributed.aux_output_connector.worker.
CALLED = {
    "get_aux_output_connector": "model vllm_config kv_cache_config",
    "AuxOutputWorkerConnector.begin_step": "self metadata",
    "AuxOutputWorkerConnector.prepare_output": "self input_batch",
    "PendingAuxOutput.enqueue_cpu_copy": "self num_sampled num_rejected",
}


@contextlib.contextmanager
def returned(on_gpu: bool) -> Iterator[None]:
    """Around the start of an engine with `enable_return_routed_experts`: every rank answers, and a CPU may."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector import worker

    everyone = SimpleNamespace(is_first_rank=True)
    with contextlib.ExitStack() as patches:
        patches.enter_context(replaced(worker, "get_tp_group", lambda: everyone, ""))
        if not on_gpu:  # vLLM asks for its second runner, which needs Triton; `ExpertsOnCpu` does what that one does
            patches.enter_context(replaced(VllmConfig, "_verify_aux_output_compatibility", lambda config: None, "self"))
        yield


class ExpertsOnCpu:
    """The calls into the connector of a worker's step, as vLLM's second runner makes them."""

    def __init__(self, config: VllmConfig, model: torch.nn.Module, cache: KVCacheConfig) -> None:
        from vllm.distributed.aux_output_connector import worker

        for function, parameters in CALLED.items():
            check_parameters(operator.attrgetter(function)(worker), parameters)
        self._connector = worker.get_aux_output_connector(model, config, cache)
        self._batch = SimpleNamespace(req_ids=[])

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Begins to record, before the forward pass."""
        self._connector.begin_step(scheduled.aux_output_connector_metadata)

    def computed(self, scheduled: SchedulerOutput, batch: InputBatch) -> None:
        """Says after it which rows of what was chosen are whose."""
        names = list(batch.req_ids)
        counts = [scheduled.num_scheduled_tokens[name] for name in names]
        self._batch = SimpleNamespace(
            req_ids=names,
            query_start_loc_np=np.cumsum([0, *counts]),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(names)].copy(),
        )

    def close(self) -> None:
        self._connector.close()

    def hand_over(self, output: ModelRunnerOutput) -> None:
        """Hands what was recorded to the scheduler, after sampling."""
        pending = self._connector.prepare_output(self._batch)
        drawn = np.array([len(output.sampled_token_ids[output.req_id_to_index[name]]) for name in self._batch.req_ids])
        pending.enqueue_cpu_copy(drawn, np.zeros_like(drawn))
        output.aux_output_connector_output = pending.process_output()
