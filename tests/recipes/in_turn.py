"""A process that runs several recipes one after the other, each as `megatron-rl` runs a rank: imports are most of a start.

Started by `run_ranks` with a file of lists of runs, and a folder for what becomes of them: `<i>.jsonl` of list i. One list:
the processes are ranks of one world. Several: each process is a world of its own, and has the list of its number. A run is
what `trainer.main` is given: command, run folder, checkpoint. The first that fails is the last.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path


def run_all(lists: list[list[list[str]]], outcomes: Path) -> None:
    from megatron_rl.runtime.attempts import ATTEMPT, free_port
    from megatron_rl.runtime.rank_job import RankJob
    from megatron_rl.trainer.rank.main import main

    del os.environ[ATTEMPT]  # of all; each run makes its own
    number, port = 0, int(os.environ["MASTER_PORT"])
    if len(lists) > 1:
        number = int(os.environ["RANK"])
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for turn, (command, run_dir, resume) in enumerate(lists[number]):
        # A rank may begin while another still leaves the run before; a world of one needs no port that others know.
        os.environ["MASTER_PORT"] = str(port + turn if len(lists) == 1 else free_port())
        code = main(RankJob(command, run_dir, f"{run_dir}/recipe.yaml", resume))
        if os.environ["RANK"] == "0":
            with (outcomes / f"{number}.jsonl").open("a") as file:
                file.write(json.dumps([run_dir, code]) + "\n")
        if code:
            sys.exit(code)
        if turn % 4 == 3:  # most of a second, for which all that was imported is searched
            gc.unfreeze()  # `main` is to be the last of its process
            gc.collect()  # the engines, which `shutdown` leaves to the end of its process
        gc.freeze()  # vLLM collects garbage several times per engine: what stays anyway need not be looked at


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
