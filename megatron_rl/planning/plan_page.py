"""A plan as one page: memory and time by phase, the simulated steps, and what failures leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron_rl.planning.components import GIB, HOST_PHASES, PHASES, MemoryPlan
from megatron_rl.planning.simulation.failures import daly, young
from megatron_rl.planning.simulation.forecast import Forecast, Goodput
from megatron_rl.planning.simulation.simulated_steps import BUILT, SimulatedRun
from megatron_rl.planning.tables import rate_of, title
from megatron_rl.planning.time.step import StepTime
from megatron_rl.report import charts
from megatron_rl.report.charts import COLOURS, Drawing, Line, curves
from megatron_rl.report.html import document, section, table, text

_STYLE = """
.bar { display: flex; height: 1.5rem; border-radius: 4px; overflow: hidden; background: var(--line); position: relative }
.bar > span { height: 100%; min-width: 1px } .bar > span:hover { filter: brightness(1.25) }
.row { display: grid; grid-template-columns: 9rem 1fr 13rem; gap: .8rem; align-items: center; margin: .3rem 0 }
.row { font-size: .9rem }
.row > :last-child { text-align: right; font-variant-numeric: tabular-nums }
.key { display: inline-block; margin: .1rem .9rem .1rem 0; font-size: .8rem; color: var(--soft) }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em }
.limit { position: absolute; top: 0; bottom: 0; width: 0; border-left: 2px dashed var(--bad) }
.card { background: var(--box); border-radius: 8px; padding: .8rem 1rem; margin: .8rem 0 }
"""
_STEPS, _POINTS = 2, 300  # of a simulation's chart


def render(
    heading: str,
    verdicts: Sequence[str],
    memory: Sequence[tuple[str, MemoryPlan]],
    step: StepTime,
    forecast: Forecast | None,
) -> str:
    """`memory`: what the fullest GPU, or each class of ranks, holds; `verdicts`: what does not fit."""
    fits = (
        '<p class="good">It fits.</p>'
        if not verdicts
        else "".join(f'<p class="bad">{text(one)}</p>' for one in verdicts)
    )
    plan = memory[0][1]
    about = f"{plan.world} GPUs, {plan.engines} engines; predicted"
    elements = [f'<h1>{text(heading)}</h1><p class="sub">{text(about)}</p>', fits]
    elements += section("Memory", list(_memory(memory)))
    elements += section("A step", list(_time(step)))
    if forecast is not None:
        elements += section("Simulated steps", list(_simulated(forecast)))
        if forecast.goodput is not None:
            elements += section("Checkpoints and failures", list(_failures(forecast.goodput)))
        elements.append(charts.script())
    return document(heading, charts.STYLE + _STYLE, elements)


def _coloured(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}


# --------------------------------------------------------------------------------------------------------- memory, time
def _memory(memory: Sequence[tuple[str, MemoryPlan]]) -> Iterator[str]:
    colours = _coloured([one.part.value for _, plan in memory for one in plan.components])
    there_is = memory[0][1].gpu_bytes
    limits = dict.fromkeys(PHASES, there_is) | dict.fromkeys(HOST_PHASES, memory[0][1].host_bytes)
    most = max([there_is, *(plan.peak(phase) for _, plan in memory for phase in limits)])
    for label, plan in memory:
        yield f'<div class="card"><b>{text(label)}</b>'
        for phase, limit in limits.items():
            components = [component for component in plan.components if phase in component.phases]
            segments = [
                (
                    component.bytes / most,
                    colours[component.part.value],
                    f"{component.part.value}: {component.bytes / GIB:.1f} GiB",
                )
                for component in components
            ]
            figure = f"{plan.peak(phase) / GIB:.1f} {'GiB' if limit is None else f'of {limit / GIB:.0f} GiB'}"
            bar = _bar(segments, limit=None if limit is None else min(1.0, limit / most))
            yield _row(
                phase + " (host)" * (phase in HOST_PHASES), bar, figure, limit is not None and plan.peak(phase) > limit
            )
        yield "</div>"
    yield _legend(colours)
    rows = [
        [
            component.part.value,
            *(f"{component.bytes / GIB:.1f}" if phase in component.phases else "" for phase in limits),
        ]
        for component in memory[0][1].components
    ]
    yield f"<details><summary>GiB, {text(memory[0][0])}</summary>{table(['', *limits], rows, len(limits))}</details>"


def _time(step: StepTime) -> Iterator[str]:
    rates, colours = step.tokens_per_s_per_gpu, _coloured(list(step.seconds))
    segments = [
        (seconds / step.total, colours[name], f"{name}: {seconds:.1f} s, {seconds / step.total:.0%}")
        for name, seconds in step.seconds.items()
        if name not in step.beside
    ]
    yield f'<div class="card">{_row("a step", _bar(segments), f"{step.total:,.1f} s")}'
    longest = max(step.seconds.values())
    for name, seconds in step.seconds.items():
        bound = step.bounds.get(name, "")
        yield _row(name, _bar([(seconds / longest, colours[name], bound)]), f"{seconds:,.1f} s, {bound}")
    yield "</div>"
    rows = [
        [
            name,
            step.bounds.get(name, ""),
            f"{seconds:,.1f}",
            f"{seconds / step.total:.0%}",
            rate_of(name, rates),
        ]
        for name, seconds in step.seconds.items()
    ]
    rows.append(["step", "", f"{step.total:,.1f}", "100%", f"{rates['step']:,.0f}"])
    yield table(["phase", "bounded by", "seconds", "share", "tokens/s/GPU"], rows, 3)


def _row(label: str, bar: str, figure: str, over: bool = False) -> str:
    return f'<div class="row"><span>{text(label)}</span>{bar}<span{" class=bad" if over else ""}>{text(figure)}</span></div>'


def _bar(segments: Sequence[tuple[float, str, str]], limit: float | None = None) -> str:
    """Segments: share of the width, colour, what is shown under the mouse."""
    spans = "".join(
        f'<span style="width:{100 * share:.3f}%;background:{colour}" title="{text(about)}"></span>'
        for share, colour, about in segments
    )
    line = f'<span class="limit" style="left:{100 * limit:.2f}%"></span>' if limit is not None else ""
    return f'<div class="bar">{spans}{line}</div>'


def _legend(colours: Mapping[str, str]) -> str:
    return (
        "<p>"
        + "".join(f'<span class="key"><i style="background:{c}"></i>{text(name)}</span>' for name, c in colours.items())
        + "</p>"
    )


# ----------------------------------------------------------------------------------------------------------- simulation
def _simulated(forecast: Forecast) -> Iterator[str]:
    rows, colours = [], _coloured([name for run in forecast.runs.values() for name in run.phases()])
    longest = max(float(run.seconds.mean()) for run in forecast.runs.values())
    bars = []
    for mode, run in forecast.runs.items():
        figures = [run.seconds.mean(), *np.quantile(run.seconds, (0.5, 0.95)), run.tokens_per_s_per_gpu]
        shares = [run.idle(), run.tail_share]
        rows.append(
            [
                title(mode, run, forecast.job),
                "" if mode in BUILT else "not in this product",
                *(f"{value:,.0f}" for value in figures),
                *(f"{share:.0%}" for share in shares),
            ]
        )
        if mode == "synchronous":  # else phases run side by side
            phases = {name: float(seconds.mean()) for name, seconds in run.phases().items()}
            segments = [(took / longest, colours[name], f"{name}: {took:.1f} s") for name, took in phases.items()]
            bars += [
                _row(title(mode, run, forecast.job), _bar(segments), f"{sum(phases.values()):,.0f} s"),
                _legend(colours),
            ]
    yield table(["", "", "s / step", "median", "95 %", "tokens/s/GPU", "idle GPUs", "tail of generation"], rows, 6)
    yield f'<div class="card">{"".join(bars)}</div>'
    lines = [
        Line(title(mode, run, forecast.job), COLOURS[i], *_decoded(run))
        for i, (mode, run) in enumerate(forecast.runs.items())
    ]
    yield from curves([Drawing("Sequences being decoded", "", lines, at_least=1.0, axis="second")], 0)


def _decoded(run: SimulatedRun) -> tuple[list[float], list[float]]:
    """Seconds, and the sequences that all engines decode then, over the first steps."""
    changes, begin = list[tuple[float, int]](), 0.0
    for step in run.steps[:_STEPS]:
        for of_engine in step.generation.running:
            before = 0
            for second, count in [*of_engine, (step.generation.seconds, 0)]:
                changes.append((begin + second, count - before))
                before = count
        begin += step.seconds
    moments, counts = np.array(sorted(changes)).T
    shown = np.linspace(0, begin, _POINTS)
    at = np.searchsorted(moments, shown, side="right")
    return shown.round(1).tolist(), np.concatenate([[0.0], counts.cumsum()])[at].tolist()


def _failures(result: Goodput) -> Iterator[str]:
    each, failures = result.step_seconds, result.failures
    marks = [("best", result.best.steps * each), ("Young", young(failures)), ("Daly", daly(failures))]
    if result.recipe is not None:
        marks.append(("this recipe", result.recipe.steps * each))
    said = ", ".join(f"{name} {seconds / 60:,.0f} min" for name, seconds in marks)
    yield (
        f"<p>A failure every {failures.between / 3600:,.1f} h. At the best interval "
        f"{result.best.goodput:.1%} of the time are steps that are kept. Work between two saves: {said}.</p>"
    )
    minutes = [round(interval.steps * each / 60, 2) for interval in result.intervals]
    goodput = [round(interval.goodput, 5) for interval in result.intervals]
    line = Line("goodput", COLOURS[0], minutes, goodput)
    yield from curves(
        [Drawing("Goodput by minutes of work between two saves", "", [line], axis="minute")], 1, "minutes"
    )
