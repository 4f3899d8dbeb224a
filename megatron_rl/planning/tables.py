"""Plans, steps, layouts and simulations as text, and as figures for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.config import Config
from megatron_rl.config.load import as_tree
from megatron_rl.planning.components import GIB, HOST_PHASES, PHASES, MemoryPlan
from megatron_rl.planning.memory import active_parameters, total_parameters
from megatron_rl.planning.search import Found, Space
from megatron_rl.planning.simulation.failures import daly, young
from megatron_rl.planning.simulation.forecast import Forecast, Goodput
from megatron_rl.planning.simulation.simulated_steps import BUILT, Mode, SimulatedJob, SimulatedRun, partial_of
from megatron_rl.planning.time.lengths import LogNormal, Recorded
from megatron_rl.planning.time.step import GENERATE, SYNC, UPDATE, Predictor, StepTime

if TYPE_CHECKING:
    from megatron_rl.planning.exact import RankMemory

_FAR = 5  # a factor between a run's time and its prediction that only other hardware explains


# ------------------------------------------------------------------------------------------------------------- memory
def memory_table(config: Config, plan: MemoryPlan, source: str = "") -> str:
    """The table, then what it means, then what does not fit. `source`: a remark on the model."""
    parallel, model, widths = config.actor.parallel, plan.model, _widths()
    total, active = total_parameters(model), active_parameters(model)
    lines = [
        f"model: {total / 1e9:.2f} B parameters"
        + (f", {active / 1e9:.2f} B of them active per token" if active != total else "")
        + source,
        f"actor: tensor {parallel.tensor} x pipeline {parallel.pipeline} x "
        + (f"context {parallel.context} x " if parallel.context > 1 else "")
        + f"data {plan.data_parallel}"
        + (f", expert {parallel.expert}" if model.experts else "")
        + (f" x {parallel.expert_tensor}" if parallel.expert_tensor > 1 else "")
        + f" on {plan.world} GPUs; {plan.parameters.total / 1e9:.3f} B parameters on the fullest",
        f"engines{' on GPUs of their own' if plan.generators else ''}: {plan.engines} of {config.rollout.tensor_parallel} "
        f"GPUs; the cache of each holds {plan.cache_tokens:,.0f} tokens, "
        f"{plan.full_length_sequences:.0f} sequences of full length ({plan.longest}"
        + (f", and a state that takes the room of {plan.state_tokens:,.0f})" if plan.state_tokens else ")"),
        "",
        f"{'GiB on the fullest GPU (last two: host)':42s}"
        + "".join(f"{phase:>{width}s}" for phase, width in widths.items()),
    ]
    for part in plan.components:
        cells = "".join(
            f"{part.bytes / GIB:{width}.1f}" if phase in part.phases else " " * width for phase, width in widths.items()
        )
        lines.append(f"{part.part.value + (' *' if part.estimate else ''):42s}{cells}".rstrip())
    lines.append(f"{'sum':42s}" + "".join(f"{plan.peak(phase) / GIB:{width}.1f}" for phase, width in widths.items()))
    lines.append(f"{'there is':42s}" + _there_is(plan))
    lines.append(
        "* estimates, compared with one GPU: docs/gpu.md; weights, gradients, optimizer state, cache are counted"
    )
    if plan.model.description.vision is not None:
        lines.append("not in it: what the vision tower's passes keep, and their time")
    problems = list(plan.problems())
    lines += ["", "it fits" if not problems else "IT DOES NOT FIT", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)


def exact_figures(measured: Sequence[tuple[RankMemory, MemoryPlan]]) -> dict[str, object]:
    """Each class of ranks, in bytes; of the last two phases they are the host's."""
    names = ("rank", "ranks", "stage", "parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return {
        "rank_classes": [
            {name: getattr(memory, name) for name in names}
            | {"phases": {phase: {"peak_bytes": round(plan.peak(phase))} for phase in (*PHASES, *HOST_PHASES)}}
            for memory, plan in measured
        ]
    }


def exact_table(measured: Sequence[tuple[RankMemory, MemoryPlan]]) -> str:
    """A line per pipeline stage, of those of its ranks that hold most."""
    columns = ("weights", "gradients", "optimizer", "passes")
    widths = _widths()
    lines = [
        f"{'GiB':>14s}{'counted on modules without content':>44s}  at the most, by phase; the last two on the host",
        f"{'ranks':>14s}{'B parameters':>14s}"
        + "".join(f"{name:>10s}" for name in columns)
        + "".join(f"{phase:>{width}s}" for phase, width in widths.items()),
    ]
    for memory, plan in fullest_ranks(measured):
        counted = (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes, memory.update_bytes)
        lines.append(
            f"{f'{memory.rank} to {memory.rank + memory.ranks - 1}':>14s}{memory.parameters / 1e9:14.3f}"
            + "".join(f"{value / GIB:10.1f}" for value in counted)
            + "".join(f"{plan.peak(phase) / GIB:{width}.1f}" for phase, width in widths.items())
        )
    lines.append(f"{'there is':>68s}" + _there_is(measured[0][1]))
    problems = list(dict.fromkeys(problem for _, plan in measured for problem in plan.problems()))
    lines += ["", "it fits" if not problems else "IT DOES NOT FIT", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)


def fullest_ranks(measured: Sequence[tuple[RankMemory, MemoryPlan]]) -> list[tuple[RankMemory, MemoryPlan]]:
    """The rank class of each pipeline stage that holds most, for all of the stage's ranks."""
    fullest = []
    for _, group in groupby(measured, key=lambda one: one[0].stage):
        classes = list(group)
        memory, plan = max(classes, key=lambda one: one[0].optimizer_bytes)
        ranks = sum(own.ranks for own, _ in classes)
        fullest.append((replace(memory, rank=classes[0][0].rank, ranks=ranks), plan))
    return fullest


def _widths() -> dict[str, int]:
    """Columns of the table's phases."""
    return {phase: max(len(phase) + 2, 8) for phase in (*PHASES, *HOST_PHASES)}


def _there_is(plan: MemoryPlan) -> str:
    """The line's cells: memory of a GPU, and of the host where it was given."""
    host = "" if plan.host_bytes is None else f"{plan.host_bytes / GIB:.1f}"
    cells = {phase: host if phase in HOST_PHASES else f"{plan.gpu_bytes / GIB:.1f}" for phase in _widths()}
    return "".join(f"{cells[phase]:>{width}s}" for phase, width in _widths().items()).rstrip()


# --------------------------------------------------------------------------------------------------------------- step
def step_figures(step: StepTime) -> dict[str, object]:
    return {
        "seconds": {**step.seconds, "step": step.total},
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "bounds": dict(step.bounds),
        "bubble_share": step.bubble,
        "generation_share": step.generation_share,
        "tail_idle_share": step.generation.idle,
        "microbatches": step.microbatches,
    }


def rate_of(phase: str, rates: Mapping[str, float]) -> str:
    """Tokens per second, as text; empty for a phase that moves weights."""
    return "" if phase == SYNC or phase not in rates else f"{rates[phase]:,.0f}"


def step_table(step: StepTime, predictor: Predictor, config: Config) -> str:
    """A line per phase, and what waits."""
    lengths, rates = predictor.lengths, step.tokens_per_s_per_gpu
    longest = lengths.longest(step.responses / lengths.mean)
    lines = [
        f"a step on {predictor.hardware.name}: {step.tokens / 1e6:.2f} M tokens, prompts of {lengths.prompt:,.0f} and "
        f"responses of {lengths.mean:,.0f} in the mean, the longest about {longest:,.0f}",
        f"{_kind(predictor, config):40s}{'seconds':>10s}{'share':>10s}{'tokens/s/GPU':>14s}  bounded by",
    ]
    for name, seconds in step.seconds.items():
        lines.append(
            f"{name:40s}{seconds:10.1f}{seconds / step.total:10.0%}{rate_of(name, rates):>14s}  {step.bounds.get(name, '')}"
        )
    lines.append(f"{'step':40s}{step.total:10.1f}{1:10.0%}{rates['step']:14,.0f}")
    waits = [
        f"{step.generation.idle:.0%} of the engines' places are empty while the longest responses end ({GENERATE})"
    ]
    if step.generation_share != 1:
        keys = (
            ("rollout.partial", config.rollout.partial),
            ("trainer.like_lengths, from the second epoch on", config.trainer.like_lengths > 1),
            ("algorithm.resample_rounds", config.algorithm.resample_rounds),
        )
        ways = "; ".join(key for key, is_set in keys if is_set)
        waits = [
            f"{GENERATE}: {step.generation_share:.2f} times a plain step's, by simulated steps ({ways}); of a plain step's "
            f"places {step.generation.idle:.0%} are empty while the longest responses end"
        ]
    if step.beside:
        waits.append(
            f"{' and '.join(name for name in step.beside if name in step.seconds)} of the next step go on beside it"
        )
    if step.bubble > 0:
        waits.append(f"the pipeline's bubble is {step.bubble:.0%} of the {UPDATE}")
    lines.append("; ".join(waits))
    if (speculation := config.rollout.speculation) is not None:
        guessed = f"{predictor.drafted_share:.0%} of the tokens" if predictor.drafted_share else "no token"
        lines.append(
            f"{GENERATE}: as if {guessed} drawn {speculation.below} sequences at a time or fewer had been guessed "
            "(rollout.speculation, --drafted-share)"
        )
    if factors := predictor.factors:
        took = ", ".join(f"{name} {factor:.3g}" for name, factor in factors.items())
        far = any(not 1 / _FAR < factors.get(name, 1.0) < _FAR for name in (GENERATE, UPDATE))
        doubt = (
            f": it did not run on {predictor.hardware.name}, and of another recipe this predicts nothing" if far else ""
        )
        lines.append(f"the run's times, as multiples of their prediction: {took}{doubt}")
    return "\n".join(lines)


def _kind(predictor: Predictor, config: Config) -> str:
    if predictor.factors:
        return "predicted, scaled to a run's times"
    return "predicted" + (" at the rates of bf16" if config.model.dtype == "float32" else ", updates timed on one GPU")


# ------------------------------------------------------------------------------------------------------------ layouts
def layout_figures(layout: Found) -> dict[str, object]:
    """The layout's keys, its step and what stays free."""
    actor, rollout = as_tree(layout.config)["actor"], as_tree(layout.config)["rollout"]
    of_actor = ("parallel", "tokens_per_microbatch", "recompute", "recompute_modules", "recompute_layers", "offload")
    of_rollout = ("tensor_parallel", "expert_parallel", "memory_fraction", "fp8")
    return {
        "actor": {name: actor[name] for name in (*of_actor, "offload_weights", "fp8")},
        "rollout": {name: rollout[name] for name in of_rollout},
        "launch": {"generators": layout.config.launch.generators},
        "headroom_bytes": round(layout.headroom),
        "step_time": step_figures(layout.step),
    }


def _describe(layout: Found) -> tuple[str, ...]:
    """Cells of the table: actor, micro-batch, what is computed again, what is offloaded, engines."""
    actor, rollout = layout.config.actor, layout.config.rollout
    parallel = actor.parallel
    sizes = {
        "TP": parallel.tensor,
        "PP": parallel.pipeline,
        "VP": parallel.virtual_pipeline,
        "CP": parallel.context,
        "EP": parallel.expert,
        "ETP": parallel.expert_tensor,
    }
    again: str = actor.recompute
    if again == "selective":
        again = "+".join(actor.recompute_modules)
    elif again == "full" and actor.recompute_layers is not None:
        again = f"{actor.recompute_layers} layers"
    return (
        " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        + f" DP{layout.plan.data_parallel}"
        + (" FP8" if actor.fp8 is not None else ""),
        f"{actor.tokens_per_microbatch}",
        again,
        "all" if actor.offload_weights else "state" if actor.offload else "",
        f"{layout.plan.engines} x {rollout.tensor_parallel}{' EP' * rollout.expert_parallel}"
        f"{' FP8' if rollout.fp8 != 'none' else ''}, {rollout.memory_fraction:.2f}"
        + (f" on {layout.plan.generators} GPUs" if layout.plan.generators else ""),
    )


def layout_table(layouts: Sequence[Found], recipe_layout: Found | None, space: Space, predictor: Predictor) -> str:
    lengths = predictor.lengths
    columns = f"{'actor':28s}{'tokens':>7s}  {'again':18s}{'offload':9s}engines, share"
    lines = [
        f"{space.gpus} GPUs ({predictor.hardware.name}); prompts of {lengths.prompt:,.0f} and responses of "
        f"{lengths.mean:,.0f} tokens in the mean; at least {space.headroom / GIB:g} GiB stay free; times are predictions",
        f"{'s/step':>8s}{'tok/s/GPU':>10s}{'free GiB':>9s}  {columns}",
    ]
    for one in (*layouts, *([recipe_layout] if recipe_layout is not None else [])):
        actor, tokens, again, offload, engine = _describe(one)
        rates = f"{one.step.total:8.1f}{one.step.tokens_per_s_per_gpu['step']:10,.0f}{one.headroom / GIB:9.1f}"
        own = "  (the recipe's own)" if one is recipe_layout else ""
        lines.append(f"{rates}  {actor:28s}{tokens:>7s}  {again:18s}{offload:9s}{engine}{own}")
    return "\n".join([*lines, *([] if layouts else ["NO LAYOUT FITS: more nodes, or shorter sequences"])])


# --------------------------------------------------------------------------------------------------------- simulation
def title(name: Mode, run: SimulatedRun, job: SimulatedJob) -> str:
    if name == "partial":
        return f"partial, chunks of {partial_of(job).chunk_tokens:,}, {partial_of(job).opened(job.prompts):,} open"
    if name == "one step off":
        return f"split, launch.generators={round(run.engines_share * run.gpus)} of {run.gpus} GPUs"
    if job.resampling is not None:
        return f"{name}, resampled {'ahead' if job.resampling.ahead else 'round by round'}"
    return name


def simulation_table(simulated: Forecast, config: Config) -> str:
    job, run = simulated.job, simulated.runs["synchronous"]
    seconds, total = run.phases() | {"step": run.seconds}, float(run.seconds.mean())
    lengths = (
        f"recorded, of {len(job.lengths.groups)} prompts"
        if isinstance(job.lengths, Recorded)
        else f"log-normal around {job.lengths.mean:,.0f} tokens"
        if isinstance(job.lengths, LogNormal)
        else ""
    )
    runs_otherwise = config.rollout.partial or config.launch.generators or config.trainer.like_lengths > 1
    heading = "synchronous" if runs_otherwise else "synchronous, as a run is"
    lines = [
        f"{len(run.steps)} steps simulated: {job.engines} engines, {job.prompts * job.count:,} responses a step, {lengths}",
        f"{heading:40s}{'seconds':>10s}{'median':>10s}{'p95':>10s}{'share':>10s}{'idle':>10s}",
    ]
    for name, values in seconds.items():
        idle = run.idle(None if name == "step" else name)
        lines.append(
            f"{name:40s}{values.mean():10.1f}{np.median(values):10.1f}{np.quantile(values, 0.95):10.1f}"
            f"{values.mean() / total:10.0%}{idle:10.0%}"
        )
    set_back = sum(step.generation.set_back for step in run.steps) / len(run.steps)
    lines += [
        f"the last 5 % of the responses take {run.tail_share:.0%} of {GENERATE}"
        + (
            f"; {set_back:,.0f} times a step a full cache sets a sequence back to be read again later: fewer at once "
            "(rollout.max_concurrent) need less cache"
            if set_back
            else ""
        ),
        "",
        f"{'':40s}{'s / step':>10s}{'p95':>10s}{'tokens/s/GPU':>14s}{'idle GPUs':>11s}",
    ]
    for mode, other in simulated.runs.items():
        lines.append(
            f"{title(mode, other, job):40s}{other.seconds.mean():10.1f}{np.quantile(other.seconds, 0.95):10.1f}"
            f"{other.tokens_per_s_per_gpu:14,.0f}{other.idle():11.0%}"
            + ("" if mode in BUILT else "  not in this product")
        )
    if config.algorithm.resample_rounds and job.resampling is None:
        lines.append("as if every group had a signal; --signal-share says how many algorithm.resample_rounds replaces")
    if simulated.goodput is not None:
        lines += ["", *_goodput_lines(simulated.goodput)]
    return "\n".join(lines)


def _goodput_lines(forecast: Goodput) -> list[str]:
    failures, best, each = forecast.failures, forecast.best, forecast.step_seconds
    lines = [
        f"a failure every {failures.between / 3600:,.1f} h: {failures.restart / 60:g} min to restart; a save holds training "
        f"up for {failures.blocked:.1f} s and is written in {failures.write:,.0f} s",
        f"goodput {best.goodput:.1%} at the best interval, {best.steps} step{'s' * (best.steps > 1)} or "
        f"{best.steps * each / 60:,.0f} min of work "
        f"(Young: {young(failures) / 60:,.0f}, Daly: {daly(failures) / 60:,.0f} min)",
    ]
    if forecast.recipe is not None:
        lines.append(f"with this recipe's checkpoint.every={forecast.recipe.steps}: {forecast.recipe.goodput:.1%}")
    return lines


def simulation_figures(simulated: Forecast) -> dict[str, object]:
    result: dict[str, object] = {
        mode: {
            "seconds": float(run.seconds.mean()),
            "seconds_p50": float(np.median(run.seconds)),
            "seconds_p95": float(np.quantile(run.seconds, 0.95)),
            "tokens_per_s_per_gpu": run.tokens_per_s_per_gpu,
            "idle_share": run.idle(),
            "tail_share": run.tail_share,
            "phases": {
                name: {"seconds": float(values.mean()), "idle_share": run.idle(name)}
                for name, values in run.phases().items()
            },
        }
        for mode, run in simulated.runs.items()
    }
    if simulated.goodput is not None:
        best, own, failures = simulated.goodput.best, simulated.goodput.recipe, simulated.goodput.failures
        result["goodput"] = {
            "best": {"steps": best.steps, "goodput": best.goodput},
            "recipe": None if own is None else {"steps": own.steps, "goodput": own.goodput},
            "young_seconds": young(failures),
            "daly_seconds": daly(failures),
        }
    return {"simulation": result}
