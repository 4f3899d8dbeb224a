"""vLLM's CPU worker, with four defects of vLLM 0.32 fixed.

It names the shared-memory segment of its CPU collectives after the init method, which under the external launcher is the same
for every run on the machine: two concurrent runs, or a run after a crash, would share a segment.

It packs the experts' weights for its CPU kernels only when a layer is first set up, so that a mixture of experts computes
with garbage after new weights.

And it repacks the weights of another layer only when a weight arrives under the layer's own name. For a tied output layer
none does, because its weight is the embedding's: it would keep computing with the packed copy of the old weights.

With expert parallelism, its kernels take the model's expert numbers for their own, and read past their weights.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_rl.runtime import leftovers
from megatron_rl.seams import vllm as seam


class ColocatedCpuWorker(CPUWorker):
    def init_device(self) -> None:
        # Read for the name only: the process group exists already. The port is unique to the run.
        self.distributed_init_method = f"env://:{leftovers.run_prefix()}"
        seam.skip_experts_of_other_ranks()
        super().init_device()

    def reload_weights(self, *args: object, **options: object) -> None:
        model = self.model_runner.model
        seam.unpack_experts(model)
        before = seam.products(model)
        super().reload_weights(*args, **options)
        seam.refresh(model, before)
