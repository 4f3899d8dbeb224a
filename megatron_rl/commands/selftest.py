"""`megatron-rl selftest`: the whole stack on this node, part by part, each in processes of its own."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from datetime import datetime
from pathlib import Path

from megatron_rl.launch.ranks import machine_here
from megatron_rl.runtime import exit_codes, streams
from megatron_rl.runtime.attempts import rank_environment
from megatron_rl.runtime.spawn import run_ranks
from megatron_rl.selftest.results import FAILED, LEFT_OUT, OK, Result, page
from megatron_rl.selftest.steps import STEPS, SelfTestStep


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--keep-going", action="store_true", help="go on after a step that fails")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--only", metavar="STEP", nargs="+", choices=[step.name for step in STEPS], help="only these steps"
    )
    which.add_argument(
        "--mismatch", action="store_true", help="only: where engine and actor differ in bf16, operation by operation"
    )
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="default: runs/selftest_<date and time>")


def run(args: argparse.Namespace) -> int:
    """0 where every step that this machine can run is right, 1 where one is not."""
    machine, world = machine_here()
    if world is not None and world.size > 1:
        streams.say("megatron-rl: selftest starts its own processes: start it once per node, without torchrun")
        return exit_codes.BAD_INPUT
    folder = args.run_dir or Path(f"runs/selftest_{datetime.now():%Y-%m-%d_%H-%M-%S}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        streams.say(f"megatron-rl: --run-dir {folder}: {error.strerror}; name a folder that is not there yet")
        return exit_codes.BAD_INPUT
    results: list[Result] = []
    if machine.gpus:
        where = rank_environment(machine.gpus).get("VLLM_CACHE_ROOT", "the caches that your environment names")
        streams.say(
            "on a new node the steps compile kernels first, those with an engine for minutes; what is compiled is kept "
            f"({where})",
            sys.stdout,
        )
    for step in STEPS:
        if step.name not in args.only if args.only else step.asked != args.mismatch:
            continue
        missing = _missing(step, machine.gpus)
        result = Result(step, LEFT_OUT, text=missing) if missing else _run(step, folder / step.name, machine.gpus)
        results.append(result)
        streams.say(result.line(), sys.stdout)
        (folder / "report.md").write_text(page(results, sys.argv), encoding="utf-8")
        if result.verdict == FAILED:
            streams.say(f"    likely: {step.cause}\n    its log: {folder / step.name / 'rank_0.log'}", sys.stdout)
            if not args.keep_going:
                break
    failed = [result.step.name for result in results if result.verdict == FAILED]
    said = f"{', '.join(failed)} failed" if failed else "all right"
    streams.say(f"selftest: {said}; report: {folder / 'report.md'}", sys.stdout)
    return exit_codes.FAILED if failed else exit_codes.OK


def _missing(step: SelfTestStep, gpus: int) -> str:
    """Why this machine cannot run a step; empty where it can."""
    if step.need and not gpus:
        return f"needs {'a GPU' if step.need == 'GPU' else f'a GPU with {step.need}'}"
    if gpus and step.processes > gpus:
        return f"needs {step.processes} GPUs"
    if step.need in ("Transformer Engine", "FP8") and importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine"
    return ""


def _run(step: SelfTestStep, folder: Path, gpus: int) -> Result:
    folder.mkdir()
    command = [sys.executable, "-m", "megatron_rl.selftest.rank", step.name, str(folder.absolute())]
    begin = time.monotonic()
    outcome = run_ranks(command, step.processes, folder, rank_environment(gpus))
    seconds = time.monotonic() - begin
    path = folder / "result.json"
    written = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "error" in written or outcome.code or not written:
        text = (
            written.get("error") or f"{outcome.message} (a step has at most {step.minutes:g} min, compilation included)"
        )
        return Result(step, FAILED, seconds, text=text)
    if "left_out" in written:
        return Result(step, LEFT_OUT, seconds, text=written["left_out"])
    return Result(step, OK, seconds, written["figures"])
