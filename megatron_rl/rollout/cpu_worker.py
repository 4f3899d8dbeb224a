"""vLLM's CPU worker with a shared-memory name of our own.

vLLM 0.32 names the segment of its CPU collectives after the init method, which under the external launcher is the same for
every run on the machine: two runs at once, or one after a crash, would meet in one segment.
"""

from __future__ import annotations

import os

from vllm.v1.worker.cpu_worker import CPUWorker

SEGMENT_PREFIX = "megatron_rl-"


class ColocatedCpuWorker(CPUWorker):
    def init_device(self) -> None:
        # Read for the name only: the process group exists already. The port is unique to the run.
        self.distributed_init_method = f"env://:{SEGMENT_PREFIX}{os.environ['MASTER_PORT']}"
        super().init_device()
