"""python -m benchmarks.split MODEL [--parts PART ...] [--steps N] [--spread S ...]: idle shares, split placement's too, held
against 1 - 1/tau. MODEL is a folder (`runs/quickstart/export`).

tau is the mean length of a step's longest response over the mean length of a response, of the lengths that were drawn. An
engine that holds a step's responses all at once passes as often as the longest has tokens, so 1 - 1/tau of its places have
no sequence, counted over passes. Over seconds it is another share, since passes are not equally long (with tau of the
responses' times it would be the same). `law` is the least share that can be empty over passes: what is submitted together
ends with its longest, and not before the places had passes for all of its tokens. With a place for each response it is
1 - 1/tau; of partial rollouts what is submitted are chunks. A `crowded` engine is given more than it has places for; nothing
but this least is said of it.
A generator draws a step as a synchronous engine does. That the two roles wait for each other comes beside it: a step should
be as long as the slower role, and the quicker one idle for |drawing - learning|. `beyond` is by how much a step is longer.

engine: lengths that `benchmarks.partial` forces on vLLM on a CPU, 64 places. Its synchronous engine is a generator, too.
Partial rollouts have 64 responses open (four prompts a step, chunks of 32 tokens), and crowded 128.
program: the quick start's RL with two processes, from MODEL, without a generator and with one: seconds by the clock, of steps
that neither begin nor end the run. As the recipe is, learning is slower; with few sequences at a time, drawing.
simulation: `plan --simulate`'s code for recipes/scale/qwen3-32b.yaml on H100s, 2,048 tokens in the mean. Places are the most
sequences that an engine decodes at once, of all engines. `job_idle`: GPU-seconds in empty places and in waiting for the other
role, as a share of the job's.
At the end: where empty places, over passes or over seconds, are not within 10 % of the law (partial rollouts: 15 %), and
where a step of split placement is over 10 % longer than its slower role.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.others import told
from benchmarks.partial import (
    LIMIT,
    MEAN,
    PLACES,
    PROMPTS,
    SEED,
    Phase,
    engines,
    held,
    partial_steps,
    simulated_job,
    summed,
    synchronous_step,
)
from megatron_rl.config import Config, check, load_recipe
from megatron_rl.models import model_of
from megatron_rl.planning.inputs import Cluster, Responses, hf_config_of, known_config, predictor_of
from megatron_rl.planning.simulation.engines import EngineSpeed, SimulatedGeneration
from megatron_rl.planning.simulation.forecast import Simulation, forecast
from megatron_rl.planning.simulation.simulated_steps import Mode, SimulatedJob, SimulatedRun, simulate
from megatron_rl.planning.time.hardware import parse
from megatron_rl.planning.time.lengths import LogNormal, read_lengths
from megatron_rl.report.run_record import read_run

Row = Mapping[str, float]
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
MODES: Mapping[Mode, str] = {"synchronous": "synchronous", "partial": "partial", "one step off": "split"}
BOUNDS: Mapping[str, float] = {"synchronous": 0.10, "partial": 0.15, "split": 0.10}
BEYOND = 0.10  # of the slower role's time
# One engine with room for all, whose seconds are passes: it shows what is submitted together.
ALL_AT_ONCE = EngineSpeed(lambda running, _: 1.0, lambda tokens: 0.0, math.inf, 10**9)
_PROGRAM = {"learning is slower": (), "drawing is slower": ("rollout.max_concurrent=16",)}
_FIRST = 2  # steps of the program that are not counted: engines and caches start


# ------------------------------------------------------------------------------------------------------------- the law
@dataclass(frozen=True)
class Unit:
    """Responses, or chunks of them, that are submitted together. `longest`, `tokens`: of the longest, and of all."""

    count: int
    longest: float
    tokens: float


def tau(steps: Sequence[np.ndarray]) -> float:
    """Of steps' responses, the mean longest over the mean. Every step has as many responses."""
    return float(np.mean([lengths.max() for lengths in steps]) / np.mean([lengths.mean() for lengths in steps]))


def units(generation: SimulatedGeneration) -> list[Unit]:
    """What a generation by an engine with room for all has submitted. Such an engine is empty only between two of them."""
    [running] = generation.running
    found, begin, tokens, most = list[Unit](), 0.0, 0.0, 0
    for (at, number), (until, _) in pairwise([*running, (generation.seconds, 0)]):
        tokens, most = tokens + (until - at) * number, max(most, number)
        if not number and tokens:
            found.append(Unit(most, at - begin, tokens))
            begin, tokens, most = at, 0.0, 0
    return found


def law(submitted: Sequence[Unit], places: int) -> float:
    """The least empty share of so many places over passes, one unit after the other."""
    passes = sum(max(unit.longest, unit.tokens / places) for unit in submitted)
    return 1 - sum(unit.tokens for unit in submitted) / (places * passes)


def is_crowded(submitted: Sequence[Unit], places: int) -> bool:
    """Whether more is submitted together than there are places."""
    return max(unit.count for unit in submitted) > places


def submitted_by(job: SimulatedJob, mode: Mode, steps: int) -> list[Unit]:
    """The units of a job's steps; a generator's are those of a synchronous step."""
    alone = replace(job, speed=ALL_AT_ONCE, engines=1)
    run = simulate(alone, "partial" if mode == "partial" else "synchronous", steps, SEED)
    return [unit for step in run.steps for unit in units(step.generation)]


def tau_of(job: SimulatedJob, steps: int) -> float:
    """Of the responses that a job's steps draw."""
    return tau(
        [job.lengths.draw(np.random.default_rng((SEED, step)), job.prompts, job.count)[0] for step in range(steps)]
    )


def figures(
    mode: Mode, job: SimulatedJob, steps: int, places: int, over_passes: float, over_seconds: float
) -> dict[str, object]:
    """Empty shares of so many places beside the law of what a job's steps submit."""
    submitted = submitted_by(job, mode, steps)
    of_tau, least, crowded = tau_of(job, steps), law(submitted, places), is_crowded(submitted, places)
    shown = {"tau": of_tau, "1-1/tau": 1 - 1 / of_tau, "law": least, "empty_passes": over_passes}
    shown["empty_seconds"] = over_seconds
    if not crowded and least > 0:
        shown |= {"off_passes": over_passes / least - 1, "off_seconds": over_seconds / least - 1}
    return {"mode": MODES[mode], "crowded": crowded} | {name: round(value, 3) for name, value in shown.items()}


def misses(name: str, found: Mapping[str, Any]) -> list[str]:
    """The bounds that a row does not meet."""
    bound, said = BOUNDS[found["mode"]], list[str]()
    for key in ("off_passes", "off_seconds"):
        if abs(found.get(key, 0.0)) > bound:
            said.append(f"{name}, {found['mode']}: {key} {found[key]:+.1%}, bound {bound:.0%}")
    if found.get("beyond", 0.0) > BEYOND:
        said.append(f"{name}, {found['mode']}: beyond {found['beyond']:+.1%}, bound {BEYOND:.0%}")
    if found.get("crowded") and found["empty_passes"] < found["law"]:
        said.append(f"{name}, {found['mode']}: fewer empty places than the law's least")
    return said


def tell(place: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Prints a row, and returns what it does not meet."""
    print(json.dumps(dict(place) | dict(found)), flush=True)
    return misses(", ".join(f"{name} {value}" for name, value in place.items()), found)


# ---------------------------------------------------------------------------------------------------------- an engine
def of_engine(model: str, spreads: Sequence[float], steps: int) -> list[str]:
    """Forced lengths on vLLM."""
    synchronous, partial = engines(model)
    missed = list[str]()
    for spread in spreads:
        lengths = LogNormal(MEAN, spread, LIMIT)
        job = simulated_job(ALL_AT_ONCE, lengths)
        drawn = [synchronous_step(synchronous, lengths, number) for number in range(steps)]
        missed += _of_phases(spread, "synchronous", job, drawn)
        for prompts in (PROMPTS // 2, PROMPTS):
            drawn = partial_steps(partial, lengths, steps, prompts)
            missed += _of_phases(spread, "partial", replace(job, prompts=prompts), drawn)
    return missed


def _of_phases(spread: float, mode: Mode, job: SimulatedJob, drawn: Sequence[Sequence[Phase]]) -> list[str]:
    total = summed(drawn)
    over_passes, over_seconds = 1 - total.decoded / (PLACES * total.passes), total.empty / (PLACES * total.seconds)
    found = figures(mode, job, len(drawn), PLACES, over_passes, over_seconds)
    return tell({"part": "engine", "spread": spread}, found)


# -------------------------------------------------------------------------------------------------------- the program
@dataclass(frozen=True)
class Turn:
    """A step of split placement, seconds by the clock.

    Attributes:
        seconds: from the last step's row of metrics to this one's.
        drew: of that, what the generator takes for the next step's batch, scores included.
        learned: what the process that learns takes for all but handing over and waiting.
        waited: what it waits for the batch.
    """

    seconds: float
    drew: float
    learned: float
    waited: float

    @property
    def slower(self) -> float:
        return max(self.drew, self.learned)


def turns(rows: Sequence[Row]) -> list[Turn]:
    """Of a run's steps those with one before and one behind: a batch's times are in the row of the step that it is of."""
    found = []
    for before, row, behind in zip(rows, rows[1:], rows[2:], strict=False):
        seconds = row["time"] - before["time"]
        met = sum(row.get(f"timing_s/{name}", 0.0) for name in ("wait", "sync", "sync_check"))
        drew = behind["timing_s/generate"] + behind["timing_s/reward"]
        found.append(Turn(seconds, drew, seconds - met, row["timing_s/wait"]))
    return found


def split_figures(taken: Sequence[Turn]) -> dict[str, float]:
    """Of one process of each role: shares of their time, and of the slower role's what a step takes beyond it."""
    seconds, slower = sum(turn.seconds for turn in taken), sum(turn.slower for turn in taken)
    shown = {
        "seconds_per_step": seconds / len(taken),
        "drawing": sum(turn.drew for turn in taken) / len(taken),
        "learning": sum(turn.learned for turn in taken) / len(taken),
        "learner_waits": sum(turn.waited for turn in taken) / seconds,
        "job_idle": 1 - sum(turn.drew + turn.learned for turn in taken) / (2 * seconds),
        "job_idle_by_theory": sum(abs(turn.drew - turn.learned) for turn in taken) / (2 * slower),
        "beyond": seconds / slower - 1,
    }
    return {name: round(value, 3) for name, value in shown.items()}


def of_program(model: str, steps: int) -> list[str]:
    """The quick start's steps with a generator and without."""
    missed = list[str]()
    for case, overrides in _PROGRAM.items():
        for generators in (0, 1):
            with tempfile.TemporaryDirectory() as folder:
                _train(model, Path(folder) / "run", steps + _FIRST + 1, generators, overrides)
                rows = read_run(Path(folder) / "run").steps()[_FIRST - 1 :]
                lengths = read_lengths(Path(folder) / "run")[_FIRST:]
            of_tau = tau([tokens.ravel() for tokens in lengths])
            found: dict[str, Any] = {"mode": "split" if generators else "synchronous", "tau": round(of_tau, 3)}
            found["1-1/tau"] = round(1 - 1 / of_tau, 3)
            if generators:
                found |= split_figures(turns(rows))
            else:
                found["seconds_per_step"] = round((rows[-2]["time"] - rows[0]["time"]) / (len(rows) - 2), 3)
            missed += tell({"part": "program", "case": case}, found)
    return missed


def _train(model: str, run_dir: Path, steps: int, generators: int, overrides: Iterable[str]) -> None:
    start = [sys.executable, "-m", "megatron_rl", "train", str(RECIPES / "cpu" / "quickstart.yaml")]
    keys = {
        "run_dir": run_dir,
        "model.create": "null",
        "model.path": Path(model).resolve(),
        "sft.steps": 0,
        "trainer.steps": steps,
        "trainer.eval_every": 0,
        "checkpoint.every": 0,
        "logging.report": "false",
        "logging.record_every": 1,  # the lengths
        "launch.generators": generators or "null",
    }
    command = [*start, *(f"{key}={value}" for key, value in keys.items()), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# ------------------------------------------------------------------------------------------------------ the simulation
def of_simulation(gpus: Sequence[int], spreads: Sequence[float], steps: int) -> list[str]:
    """The steps of a recipe on so many GPUs, with every spread."""
    missed = list[str]()
    for count in gpus:
        for spread in spreads:
            job, runs = _simulated(count, spread, steps)
            for mode in MODES:
                run = runs[mode]
                by_pass = simulate(_in_passes(job, run), mode, steps, SEED)
                found = figures(mode, job, steps, places_of(run), empty(by_pass), empty(run)) | waits(run)
                missed += tell({"part": "simulation", "gpus": count, "spread": spread}, found)
    return missed


def _simulated(gpus: int, spread: float, steps: int) -> tuple[SimulatedJob, Mapping[Mode, SimulatedRun]]:
    config: Config = load_recipe(RECIPES / "scale" / "qwen3-32b.yaml")
    known, _ = known_config(config, None)
    cluster = Cluster(parse("h100"), 8)
    nodes, responses = gpus // cluster.gpus_per_node, Responses(mean=2048, spread=spread)
    config = check(config, command="train", machine=cluster.machine(nodes), model=known)
    predictor = predictor_of(config, model_of(hf_config_of(config, known)), cluster, responses)
    plan = cluster.plan(config, predictor.model, nodes)
    what = Simulation(steps, responses, drawn_before=True)
    found = forecast(what, config, plan, predictor, predictor.of(config, plan))
    return found.job, found.runs


def _in_passes(job: SimulatedJob, run: SimulatedRun) -> SimulatedJob:
    """The same job, whose seconds of generation are passes; of one step off with as many engines."""
    speed = replace(job.speed, decode_seconds=lambda running, _: 1.0, prefill_seconds=lambda tokens: 0.0)
    return replace(job, speed=speed, engines_share=run.engines_share if run.engines_share < 1 else None)


def places_of(run: SimulatedRun) -> int:
    """The most sequences that an engine decodes at once, of all engines."""
    return max(sum(max(number for _, number in running) for running in step.generation.running) for step in run.steps)


def empty(run: SimulatedRun) -> float:
    """Share of the place-seconds of generation in which a place has no sequence."""
    seconds = sum(step.generation.seconds for step in run.steps)
    return 1 - sum(held(step.generation) for step in run.steps) / (places_of(run) * seconds)


def waits(run: SimulatedRun) -> dict[str, float]:
    """What a simulated job loses, as shares of its GPU-seconds; of split placement also as shares of the step."""
    seconds, spans = float(run.seconds.sum()), [span for step in run.steps for span in step.spans]
    drew = sum(span.seconds for span in spans if span.name == "generate")
    waiting = [span for span in spans if span.name == "wait"]
    lost = drew * run.engines_share * empty(run) + sum(span.seconds * span.share for span in waiting)
    shown = {"job_idle": lost / seconds, "seconds_per_step": seconds / len(run.steps)}
    if run.mode == "one step off":
        handing_over = sum(span.seconds for span in spans if span.name.startswith("sync"))
        shown |= {
            "engines_share": run.engines_share,
            "waits": sum(span.seconds for span in waiting) / seconds,
            "beyond": seconds / (seconds - handing_over) - 1,
        }
    return {name: round(value, 4) for name, value in shown.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parts = ["engine", "program", "simulation"]
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
    parser.add_argument("--steps", type=int, default=10, help="of each")
    parser.add_argument("--spread", type=float, nargs="*", default=[0.5, 1.0, 1.5], help="of the lengths' logarithm")
    parser.add_argument("--gpus", type=int, nargs="*", default=[16, 128, 1024], help="of the simulation")
    args = parser.parse_args()
    missed = of_simulation(args.gpus, args.spread, args.steps) if "simulation" in args.parts else []
    missed += of_program(args.model, args.steps) if "program" in args.parts else []
    missed += of_engine(args.model, args.spread, args.steps) if "engine" in args.parts else []
    print(
        "\n".join(["bounds that are not met:", *missed]) if missed else "where no engine is crowded, all bounds are met"
    )


if __name__ == "__main__":
    with told():
        main()
