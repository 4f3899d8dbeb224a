"""The main program of a rank, started by `megatron-rl` (or torchrun, or srun) with the world in its environment."""

from __future__ import annotations

import gc

from megatron_rl.runtime import leaving, streams
from megatron_rl.runtime.rank_job import RankJob
from megatron_rl.runtime.stop import StopFlag
from megatron_rl.seams.known_warnings import quiet_known_warnings


def main(job: RankJob) -> int:
    """Runs a command on this rank; returns the exit code."""
    stop = StopFlag()  # before anything that takes time
    quiet_known_warnings()
    gc.disable()  # a million objects are imported, and stay: to search them for garbage again and again takes seconds
    # Imported here: the launcher sets the environment that torch and vLLM read on import.
    from megatron_rl.seams import torch_compile

    torch_compile.leave_out()
    from megatron_rl.trainer.rank.program import run_rank

    return run_rank(job, stop)


if __name__ == "__main__":
    job = RankJob.parse()
    streams.accept_any_text()
    leaving.leave(main(job))
