"""vLLM's CPU worker, with four defects of vLLM 0.32 fixed, and one thing that it lacks.

It names the shared-memory segment of its CPU collectives after the init method, which under the external launcher is the same
for every run on the machine: two concurrent runs, or a run after a crash, would share a segment.

It packs the experts' weights for its CPU kernels only when a layer is first set up, so that a mixture of experts computes
with garbage after new weights.

And it repacks the weights of another layer only when a weight arrives under the layer's own name. For a tied output layer
none does, because its weight is the embedding's: it would keep computing with the packed copy of the old weights.

With expert parallelism, its kernels take the model's expert numbers for their own, and read past their weights.

It does not return the experts that tokens went to (`seams.vllm_experts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_rl.seams import check_parameters
from megatron_rl.seams import vllm as seam
from megatron_rl.seams.vllm_decoding import draw_ahead
from megatron_rl.seams.vllm_experts import ExpertsOnCpu
from megatron_rl.seams.vllm_segments import run_prefix

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput


CPU_EXPERTS = (
    "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map a1q_scale a2_scale "
    "workspace13 workspace2 expert_tokens_meta apply_router_weight_on_input"
)


class ColocatedCpuWorker(CPUWorker):
    experts: ExpertsOnCpu | None = None

    def init_device(self) -> None:
        # Read for the name only: the process group exists already. The port is unique to the run.
        self.distributed_init_method = f"env://:{run_prefix()}"
        skip_experts_of_other_ranks()
        super().init_device()
        draw_ahead(self.model_runner.sampler.topk_topp_sampler)

    def reload_weights(self, *args: object, **options: object) -> None:
        model = self.model_runner.model
        seam.unpack_experts(model)
        before = seam.products(model)
        super().reload_weights(*args, **options)
        seam.refresh(model, before)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        if self.vllm_config.aux_output_config.enabled:
            self.experts = ExpertsOnCpu(self.vllm_config, self.model_runner.model, kv_cache_config)

    def shutdown(self) -> None:
        if self.experts is not None:
            self.experts.close()
        super().shutdown()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        if self.experts is None:
            return super().execute_model(scheduler_output)
        self.experts.begin(scheduler_output)
        output = super().execute_model(scheduler_output)
        if output is None:  # tokens are drawn next
            self.experts.computed(scheduler_output, self.model_runner.input_batch)
        return output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        output = super().sample_tokens(grammar_output)
        if self.experts is not None:
            self.experts.hand_over(output)
        return output


def skip_experts_of_other_ranks() -> None:
    """Mends expert parallelism, with which vLLM's kernels for experts on a CPU get the model's expert numbers and take them
    for their own: they read past their weights. From here on they get this rank's numbers, and weight 0 for an expert of
    another rank.
    """
    original = CPUUnquantizedExperts.apply
    if original.__name__ == "apply_local":
        return
    check_parameters(original, CPU_EXPERTS)

    def apply_local(
        self: CPUUnquantizedExperts,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        **others: Any,
    ) -> None:
        if expert_map is not None:
            topk_ids = expert_map[topk_ids.long()].to(topk_ids.dtype)
            topk_weights = topk_weights.masked_fill(topk_ids < 0, 0.0)
            topk_ids = topk_ids.clamp(min=0)
        original(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others)

    CPUUnquantizedExperts.apply = apply_local
