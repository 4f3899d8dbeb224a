"""The page of `plan --html`, with memory and time by phase, the simulated steps, and what failures leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_rl.commands.simulated import Goodput, Simulated, title
from megatron_rl.commands.step_time import rate_of
from megatron_rl.planning.components import GIB, HOST_PHASES, PHASES, MemoryPlan
from megatron_rl.planning.simulation.failures import daly, young
from megatron_rl.planning.simulation.steps import SimulatedJob, SimulatedRun
from megatron_rl.planning.time.step import StepTime
from megatron_rl.report.html import document, section, table, text

_STYLE = """
.bar { display: flex; height: 1.5rem; border-radius: 4px; overflow: hidden; background: var(--line); position: relative }
.bar > span { height: 100%; min-width: 1px } .bar > span:hover, rect:hover { filter: brightness(1.25) }
.row { display: grid; grid-template-columns: 9rem 1fr 13rem; gap: .8rem; align-items: center; margin: .3rem 0 }
.row { font-size: .9rem }
.row > :last-child { text-align: right; font-variant-numeric: tabular-nums }
.key { display: inline-block; margin: .1rem .9rem .1rem 0; font-size: .8rem; color: var(--soft) }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em }
.limit { position: absolute; top: 0; bottom: 0; width: 0; border-left: 2px dashed var(--bad) }
.card { background: var(--box); border-radius: 8px; padding: .8rem 1rem; margin: .8rem 0 }
.axis { stroke: var(--soft); stroke-width: 1 } svg text { font-size: 11px } svg .faint { opacity: .65 }
.cell { fill: #2563eb } .lost { fill: var(--bad) } .kept { fill: var(--good) } .empty { fill: var(--line) }
"""
# Of phases wherever they are drawn; components of the memory take them in turn.
_COLOURS = {
    "generate": "#2563eb",
    "reward": "#d97706",
    "switch": "#64748b",
    "estimate": "#0891b2",
    "old_log_prob": "#7c3aed",
    "ref_log_prob": "#be185d",
    "update": "#059669",
    "sync": "#dc2626",
    "sync_check": "#fb7185",
    "wait": "#94a3b8",
}
_TURN = (
    *(colour for colour in _COLOURS.values() if colour != _COLOURS["sync"]),
    "#4d7c0f",
    "#78350f",
    "#0f766e",
    "#1e3a8a",
)
_WIDE, _LEFT = 1180, 60  # of drawings, and what is left of them for labels; pixels
_ROWS, _STEPS = 48, 2  # engines and steps of a timeline
_SHADES = 10


def render(
    heading: str,
    verdicts: Sequence[str],
    memory: Sequence[tuple[str, MemoryPlan]],
    step: StepTime,
    simulated: Simulated | None,
) -> str:
    """`memory`: what the fullest GPU, or each class of ranks, holds; `verdicts`: what does not fit."""
    fits = (
        '<p class="good">It fits.</p>'
        if not verdicts
        else "".join(f'<p class="bad">{text(one)}</p>' for one in verdicts)
    )
    plan = memory[0][1]
    about = f"{plan.world} GPUs, {plan.engines} engines; nothing here was measured on a GPU"
    parts = [f'<h1>{text(heading)}</h1><p class="sub">{text(about)}</p>', fits]
    parts += section("Memory", list(_memory(memory)))
    parts += section("A step", list(_time(step)))
    if simulated is not None:
        parts += section("Simulated steps", list(_simulated(simulated)))
        if simulated.goodput is not None:
            parts += section("Checkpoints and failures", list(_failures(simulated.goodput)))
    return document(heading, _STYLE, parts)


# --------------------------------------------------------------------------------------------------------- memory, time
def _memory(memory: Sequence[tuple[str, MemoryPlan]]) -> Iterator[str]:
    names = list(dict.fromkeys(one.part.value for _, plan in memory for one in plan.components))
    colours = {name: _TURN[i % len(_TURN)] for i, name in enumerate(names)}
    there_is = memory[0][1].gpu_bytes
    limits = dict.fromkeys(PHASES, there_is) | dict.fromkeys(HOST_PHASES, memory[0][1].host_bytes)
    most = max([there_is, *(plan.peak(phase) for _, plan in memory for phase in limits)])
    for label, plan in memory:
        yield f'<div class="card"><b>{text(label)}</b>'
        for phase, limit in limits.items():
            held = [part for part in plan.components if phase in part.phases]
            pieces = [
                (part.bytes / most, colours[part.part.value], f"{part.part.value}: {part.bytes / GIB:.1f} GiB")
                for part in held
            ]
            figure = f"{plan.peak(phase) / GIB:.1f} {'GiB' if limit is None else f'of {limit / GIB:.0f} GiB'}"
            bar = _bar(pieces, limit=None if limit is None else min(1.0, limit / most))
            yield _row(
                phase + " (host)" * (phase in HOST_PHASES), bar, figure, limit is not None and plan.peak(phase) > limit
            )
        yield "</div>"
    yield _legend(colours)
    rows = [
        [part.part.value, *(f"{part.bytes / GIB:.1f}" if phase in part.phases else "" for phase in limits)]
        for part in memory[0][1].components
    ]
    yield f"<details><summary>GiB, {text(memory[0][0])}</summary>{table(['', *limits], rows, len(limits))}</details>"


def _time(step: StepTime) -> Iterator[str]:
    rates = step.tokens_per_s_per_gpu
    pieces = [
        (seconds / step.total, _COLOURS[name], f"{name}: {seconds:.1f} s, {seconds / step.total:.0%}")
        for name, seconds in step.seconds.items()
    ]
    yield f'<div class="card">{_row("a step", _bar(pieces), f"{step.total:,.1f} s")}'
    longest = max(step.seconds.values())
    for name, seconds in step.seconds.items():
        bound = step.bounds.get(name, "")
        yield _row(name, _bar([(seconds / longest, _COLOURS[name], bound)]), f"{seconds:,.1f} s, {bound}")
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


def _bar(pieces: Sequence[tuple[float, str, str]], limit: float | None = None) -> str:
    """Pieces: share of the width, colour, what is shown under the mouse."""
    spans = "".join(
        f'<span style="width:{100 * share:.3f}%;background:{colour}" title="{text(about)}"></span>'
        for share, colour, about in pieces
    )
    line = f'<span class="limit" style="left:{100 * limit:.2f}%"></span>' if limit is not None else ""
    return f'<div class="bar">{spans}{line}</div>'


def _legend(colours: dict[str, str]) -> str:
    return (
        "<p>"
        + "".join(f'<span class="key"><i style="background:{c}"></i>{text(name)}</span>' for name, c in colours.items())
        + "</p>"
    )


# ----------------------------------------------------------------------------------------------------------- simulation
def _simulated(simulated: Simulated) -> Iterator[str]:
    rows = []
    for mode, run in simulated.runs.items():
        figures = [run.seconds.mean(), *np.quantile(run.seconds, (0.5, 0.95)), run.tokens_per_s_per_gpu]
        shares = [run.idle(), run.tail_share]
        product = "as it is" if mode == "synchronous" else "not in this product"
        rows.append(
            [title(mode, run), product, *(f"{value:,.0f}" for value in figures), *(f"{share:.0%}" for share in shares)]
        )
    yield table(["", "", "s / step", "median", "95 %", "tokens/s/GPU", "idle GPUs", "tail of generation"], rows, 6)
    for mode, run in simulated.runs.items():
        yield f'<div class="card"><b>{text(title(mode, run))}</b>{_timeline(simulated.job, run)}</div>'
    names = dict.fromkeys(name for run in simulated.runs.values() for name in run.phases())
    yield _legend({name: _COLOURS[name] for name in names})
    yield (
        '<p class="sub">A line per engine, the stronger the more sequences it decodes; dashed: 95 % of the responses have '
        "ended. Below: what the GPUs do that do not draw.</p>"
    )


def _timeline(job: SimulatedJob, run: SimulatedRun) -> str:
    steps = run.steps[:_STEPS]
    end = sum(step.seconds for step in steps)
    engines = range(0, len(steps[0].generation.running), -(-len(steps[0].generation.running) // _ROWS))
    tall = max(3.0, min(14.0, 260 / len(engines)))
    bottom, scale = tall * len(engines), (_WIDE - _LEFT) / end
    most = max(count for step in steps for of_engine in step.generation.running for _, count in of_engine)
    parts, begin = list[str](), 0.0
    for step in steps:
        left = _LEFT + begin * scale
        for row, number in enumerate(engines):
            parts += _cells(
                step.generation.running[number], left, row * tall, tall, scale, most, step.generation.seconds
            )
        for span in step.spans:
            if span.name != "generate":
                about = f"{span.name}: {span.seconds:.1f} s" + (
                    f" on {span.share:.0%} of the GPUs" if span.share < 1 else ""
                )
                parts.append(
                    _rect(left + span.begin * scale, bottom + 4, span.seconds * scale, 18, _COLOURS[span.name], about)
                )
        ended = left + (1 - step.generation.tail_share) * step.generation.seconds * scale
        parts.append(
            f'<line x1="{ended:.1f}" x2="{ended:.1f}" y1="0" y2="{bottom:.1f}" class="axis" stroke-dasharray="4 3"/>'
        )
        begin += step.seconds
    parts.append(
        f'<text x="0" y="12" class="faint">engines</text><text x="0" y="{bottom + 17:.0f}" class="faint">the rest</text>'
    )
    parts += [
        f'<text x="{_LEFT + at * scale:.0f}" y="{bottom + 40:.0f}" class="faint">{at:,.0f} s</text>'
        for at in _ticks(end)
    ]
    return f'<svg viewBox="0 0 {_WIDE} {bottom + 48:.0f}" role="img">{"".join(parts)}</svg>'


def _cells(
    running: Sequence[tuple[float, int]], left: float, top: float, tall: float, scale: float, most: int, seconds: float
) -> Iterator[str]:
    """One engine: a rectangle for each time with about as many sequences."""
    marks = [(at, count, math.ceil(_SHADES * count / most)) for at, count in running] + [(seconds, 0, -1)]
    begin, shade, largest = marks[0][0], marks[0][2], marks[0][1]
    for at, count, next_shade in marks[1:]:
        if next_shade == shade:
            largest = max(largest, count)
            continue
        if shade > 0 and at > begin:
            yield (
                f'<rect class="cell" x="{left + begin * scale:.1f}" y="{top:.1f}" width="{(at - begin) * scale:.2f}" '
                f'height="{tall - 0.5:.1f}" opacity="{shade / _SHADES:.1f}"><title>up to {largest} sequences</title></rect>'
            )
        begin, shade, largest = at, next_shade, count


def _rect(x: float, y: float, width: float, height: float, colour: str, about: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.5, width):.1f}" height="{height:.1f}" fill="{colour}">'
        f"<title>{text(about)}</title></rect>"
    )


def _ticks(end: float) -> list[float]:
    """Round numbers from 0, about six of them."""
    rough = end / 6
    base = 10 ** math.floor(math.log10(rough))
    width = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough)
    return [i * width for i in range(int(end / width) + 1)]


# ------------------------------------------------------------------------------------------------------------- failures
def _failures(found: Goodput) -> Iterator[str]:
    each, failures = found.step_seconds, found.failures
    marks = [("best", found.best.steps * each), ("Young", young(failures)), ("Daly", daly(failures))]
    if found.own is not None:
        marks.append(("this recipe", found.own.steps * each))
    kept = np.array([day.kept for day in found.days]) / 86_400
    yield (
        f"<p>A failure every {failures.between / 3600:,.1f} h. At the best interval {found.best.goodput:.1%} of the time are "
        f"steps that are kept; of {len(found.days)} days {kept.mean():.1%} in the mean, {kept.min():.1%} in the worst.</p>"
    )
    curve = [(interval.steps * each / 60, interval.goodput) for interval in found.intervals]
    yield f'<div class="card">{_curve(curve, [(name, seconds / 60) for name, seconds in marks])}</div>'
    shown = sorted(found.days, key=lambda day: day.kept)[:: max(1, len(found.days) // 5)]
    rows = []
    for day in shown:
        strip = [_rect(_LEFT, 0, _WIDE - _LEFT, 14, "var(--good)", "steps")]
        for at in day.failed:
            x, wide = _LEFT + at / 86_400 * (_WIDE - _LEFT), failures.restart / 86_400 * (_WIDE - _LEFT)
            strip.append(
                _rect(x, 0, max(2.0, wide), 14, "var(--bad)", f"failure after {at / 3600:.1f} h, then the restart")
            )
        label = f'<text x="0" y="12">{day.kept / 86_400:.1%}</text>'
        rows.append(f'<svg viewBox="0 0 {_WIDE} 18">{label}{"".join(strip)}</svg>')
    yield f'<div class="card"><b>Days, the worst first</b>{"".join(rows)}</div>'


def _curve(points: Sequence[tuple[float, float]], marks: Sequence[tuple[str, float]]) -> str:
    """Goodput over minutes of work between two saves, on a logarithmic axis."""
    high, wide, tall = max(y for _, y in points), _WIDE - _LEFT - 20, 220
    low = min(y for _, y in points)
    first = math.log(min([x for x, _ in points] + [x for _, x in marks]))
    last = math.log(max([x for x, _ in points] + [x for _, x in marks]))

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (math.log(x) - first) / max(1e-9, last - first) * wide, 20 + (high - y) / max(
            1e-9, high - low
        ) * (tall - 20)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    parts = [f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/>']
    for x, y in points:
        across, down = place(x, y)
        parts.append(
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="#2563eb"><title>{x:,.0f} min: {y:.2%}</title></circle>'
        )
    for number, (name, x) in enumerate(marks):
        across, _ = place(x, high)
        parts.append(
            f'<line x1="{across:.1f}" x2="{across:.1f}" y1="20" y2="{tall}" class="axis" stroke-dasharray="3 3"/>'
            f'<text x="{across + 4:.1f}" y="{tall - 8 - 14 * number}">{text(name)} {x:,.0f} min</text>'
        )
    parts.append(f'<text x="0" y="24">{high:.1%}</text><text x="0" y="{tall}">{low:.1%}</text>')
    parts.append(f'<text x="{_LEFT}" y="{tall + 20}" class="faint">minutes of work between two saves</text>')
    return f'<svg viewBox="0 0 {_WIDE} {tall + 30}" role="img">{"".join(parts)}</svg>'
