"""One process of one step: `python -m megatron_rl.selftest.rank STEP FOLDER`, with the world in its environment."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from megatron_rl.runtime import exit_codes, stop
from megatron_rl.selftest.steps import HOPPER, STEPS


def main(name: str, folder: Path) -> int:
    """Rank 0 writes `result.json`: `figures`, or `error` and what was known until then."""
    [step] = [step for step in STEPS if step.name == name]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save
    stop.let_through()
    signal.alarm(int(60 * step.minutes))  # ends a process that hangs, wherever it does
    os.dup2(2, 1)  # the terminal is the command's own; what libraries say is in the step's log
    import torch

    from megatron_rl.runtime import distributed
    from megatron_rl.seams.known_warnings import quiet_known_warnings
    from megatron_rl.selftest.bench import Bench, Surprise

    quiet_known_warnings()
    torch.manual_seed(0)
    module, _, function = step.function.partition(".")
    result, code = {}, exit_codes.OK
    try:
        if step.need == "FP8" and torch.cuda.get_device_capability() < HOPPER:
            result = {
                "left_out": f"blockwise FP8 needs compute capability 9.0: {torch.cuda.get_device_name()} has less"
            }
        else:
            bench = Bench(folder, step.processes, step.overrides, step.minutes)
            result = {"figures": getattr(importlib.import_module(f"megatron_rl.selftest.{module}"), function)(bench)}
            distributed.shutdown()
    except Exception as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, Surprise) else f"{type(error).__name__}: {error}"
        result, code = {"error": text}, exit_codes.FAILED
    if os.environ["RANK"] == "0":
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    sys.stderr.flush()
    os._exit(code)  # what libraries do at exit is not asked here, and may hang after an error


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
