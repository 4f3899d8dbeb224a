"""Data of the page's charts; charts.js draws them. One line per run and metric; colours tell runs apart, dashes
metrics. Runs of one recipe with several seeds are one line, their mean, in a band from the lowest to the highest."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from megatron_rl.report.html import script_data
from megatron_rl.report.run_record import RunRecord, by_recipe, phases_of_step, recipe_name, shown_evaluations

COLOURS = (
    *("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f"),
    *("#78350f", "#f472b6", "#1e3a8a", "#a3e635", "#fbbf24", "#0f766e", "#c4b5fd", "#fb7185"),
)
_OTHER = "#cbd5e1"  # time of a step that belongs to no phase
_DASHES = ("", "6 3", "2 2", "6 2 2 2")  # of SVG's strokes
_MANY = 60  # points from which on the raw line is faint and a running mean is drawn over it

STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(370px, 100%), 1fr)); gap: 1.1rem 1.4rem }
.chart { min-width: 0 } .chart.wide { grid-column: 1 / -1 }
.chart .title { display: flex; justify-content: space-between; gap: .6rem; font-size: .85rem; font-weight: 600 }
.chart .title .sub, .chart .legend { font-weight: 400; font-size: .72rem; color: var(--soft); margin: 0 }
.chart .title .sub { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; font-variant-numeric: tabular-nums }
.chart .legend { display: flex; flex-wrap: wrap; gap: 0 .9rem; min-height: 1.1rem; font-variant-numeric: tabular-nums }
.chart .legend svg { display: inline; vertical-align: middle; margin-right: .3rem }
.chart .legend b { color: var(--ink); font-weight: 600 }
.chart > svg { display: block; width: 100%; cursor: crosshair; touch-action: pan-y; user-select: none }
.chart svg text { font-size: 10px; fill: var(--soft) } .chart .grid { stroke: var(--line) }
@media (prefers-color-scheme: dark) { .chart svg g, .legend svg { filter: brightness(1.4) } }
.chart .at { stroke: var(--soft); stroke-dasharray: 3 3 } .chart .range { fill: var(--soft); fill-opacity: .2 }
"""


@dataclass(frozen=True)
class Chart:
    """`metrics` may have a `*` for every metric that begins and ends so; drawn only where some run has one of them.

    `at_least`: the axis goes from 0 to this or further, so that a share of a few thousandths looks like one.
    """

    title: str
    metrics: tuple[str, ...]
    log: bool = False
    at_least: float | None = None


CHARTS = (
    Chart("Evaluation", ("eval/*",)),
    Chart("Reward, weighted sum", ("reward/mean",)),
    Chart("Reward columns", ("reward/*",)),
    Chart("Groups with a signal", ("groups/signal_share",), at_least=1.0),
    Chart("Turns of a conversation", ("conversation/turns", "conversation/turns_max")),
    Chart("Share of the conversations with a turn k", ("conversation/turn_*/share",), at_least=1.0),
    Chart("Reward of turn k", ("conversation/turn_reward/*",)),
    Chart("Tool calls of a conversation", ("conversation/tool_calls", "conversation/calls/*")),
    Chart(
        "Conversations that failed, share",
        ("conversation/failed_model", "conversation/failed_infrastructure"),
        at_least=0.1,
    ),
    Chart("Response length, tokens", ("response_length/mean",)),
    Chart("Cut at the token limit", ("response_length/truncated_share",), at_least=0.1),
    Chart("Entropy, nats per token", ("actor/entropy",)),
    Chart("Gradient norm", ("actor/grad_norm",)),
    Chart("KL to the policy before the step (k3)", ("old_policy/kl_k3",), log=True),
    Chart("KL from the reference policy", ("reference/kl_*",)),
    Chart("Tokens outside the trust region", ("region_share/LN", "region_share/HP"), at_least=0.02),
    Chart("Advantage spread", ("advantage/std",)),
    Chart("Shrinkage λ", ("shrinkage/lambda",)),
    Chart("AWPO: share of the mixed advantage", ("awpo/w_mix",), at_least=1.0),
    Chart(
        "Trainer and engine: |Δ log-prob|",
        ("sync/logprob_mean_diff", "sync/logprob_max_diff", "mismatch/abs_log_ratio"),
        log=True,
    ),
    Chart("|Δ log-prob| by position in the response", ("mismatch/abs_log_ratio_from_*",), log=True),
    Chart("Tokens per second, whole step", ("perf/tokens_per_s",)),
    Chart("Peak memory, GiB", ("memory/host_peak_gib", "memory/device_peak_gib")),
    Chart("Fine-tuning: loss, nats per token", ("sft/loss",)),
    Chart("Reward model: loss", ("reward_model/loss",)),
    Chart("Reward model: accuracy", ("reward_model/accuracy",)),
)
WARM_UP_CHARTS = (
    Chart("Loss, nats per token", ("sft/loss",)),
    Chart("Gradient norm", ("actor/grad_norm",)),
    Chart("Learning rate", ("actor/lr",)),
)


def matching(chart: Chart, runs: Sequence[RunRecord]) -> list[str]:
    """The metrics of the chart that some run has. Of evaluations only the scores, of reward columns not the statistics."""
    present = sorted({name for run in runs for name in run.metrics()})
    names = []
    for pattern in chart.metrics:
        if pattern == "eval/*":
            names += [name for name in shown_evaluations(present) if "@" in name.rpartition("/")[2]]
        elif pattern == "reward/*":
            names += [
                name for name in present if name.startswith("reward/") and name not in ("reward/mean", "reward/std")
            ]
        elif "*" in pattern:
            start, _, end = pattern.partition("*")
            named = (name for name in present if name.startswith(start) and name.endswith(end))
            names += sorted(named, key=lambda name: (len(name), name))  # numbers at their ends in order
        elif pattern in present:
            names.append(pattern)
    return names


@dataclass(frozen=True)
class Line:
    """One line of a chart. `y`, `mean`, `low` and `high` are at the steps `x`; None where there is no number."""

    label: str
    colour: str
    x: Sequence[float]
    y: Sequence[float | None]
    dash: str = ""
    mean: Sequence[float | None] | None = None  # running mean, drawn in the place of `y`, which is faint then
    low: Sequence[float | None] | None = None  # ends of a band around `y`
    high: Sequence[float | None] | None = None


@dataclass(frozen=True)
class Drawing:
    """A chart's lines. `stacked`: they are layers from `low` to `high`, each as high as its `y`. `at_least`: as `Chart`.
    `axis`: what `x` counts."""

    title: str
    note: str  # the metric, where there is one
    lines: Sequence[Line]
    log: bool = False
    at_least: float | None = None
    stacked: bool = False
    axis: str = "step"


def curves(drawings: Sequence[Drawing], number: int, steps: str = "") -> list[str]:
    """Parts of the page: a place for each drawing, and their data. `number`: of these charts on the page, from 0.
    `steps`: name of the steps that they count; charts of equal ones move together."""
    if not drawings:
        return []
    places = "".join(f'<div class="chart{" wide" if drawing.stacked else ""}"></div>' for drawing in drawings)
    return [
        f'<div class="charts" data-curves="curves-{number}" data-steps="{steps}">{places}</div>',
        script_data(f"curves-{number}", json.dumps([asdict(drawing) for drawing in drawings])),
    ]


def script() -> str:
    return f"<script>{Path(__file__).with_name('charts.js').read_text('utf-8')}</script>"


def draw(chart: Chart, runs: Sequence[RunRecord]) -> Drawing | None:
    """None where no run has the chart's metrics."""
    metrics = matching(chart, runs)
    if not metrics:
        return None
    kinds, lines = by_recipe(runs), list[Line]()
    for i, seeds in enumerate(kinds):
        for j, metric in enumerate(metrics):
            steps, all_values = _together([run.series(metric) for run in seeds])
            if not steps:
                continue
            values = [fmean(of_step) for of_step in all_values]
            ends = [min, max] if len(seeds) > 1 else []
            low, high = ([_rounded([end(of_step) for of_step in all_values]) for end in ends]) or (None, None)
            if len(seeds) == 1 and (errors := seeds[0].errors(metric)):
                room = [errors.get(step, 0.0) for step in steps]
                low = _rounded([value - error for value, error in zip(values, room, strict=True)])
                high = _rounded([value + error for value, error in zip(values, room, strict=True)])
            lines.append(
                Line(
                    _label(seeds, metric, len(kinds), len(metrics)),
                    COLOURS[(i if len(kinds) > 1 else j) % len(COLOURS)],
                    steps,
                    _rounded(values),
                    _DASHES[j % len(_DASHES)] if len(kinds) > 1 else "",
                    _rounded(_running_mean(values)) if len(values) >= _MANY else None,
                    low,
                    high,
                )
            )
    log = chart.log and all(value > 0 for run in runs for metric in metrics for value in run.series(metric)[1])
    return Drawing(chart.title, metrics[0] if len(metrics) == 1 else "", lines, log, chart.at_least)


def draw_time(run: RunRecord, title: str) -> Drawing | None:
    """Seconds of each step by phase, stacked."""
    phases = phases_of_step(run.metrics())
    rows = [row for row in run.steps() if "timing_s/step" in row]
    if not phases or len(rows) < 2:
        return None
    steps = [row["step"] for row in rows]
    order = sorted(phases, key=lambda name: -sum(row.get(name, 0.0) for row in rows))
    layers = {name.removeprefix("timing_s/"): [row.get(name, 0.0) for row in rows] for name in order}
    layers["other"] = [max(0.0, row["timing_s/step"] - sum(row.get(name, 0.0) for name in order)) for row in rows]
    return _stacked(title, steps, layers)


def draw_staleness(run: RunRecord, title: str) -> Drawing | None:
    """Stacked shares of a step's trained tokens, by the weight syncs since they were drawn; None without partial rollouts."""
    metrics = sorted(
        (name for name in run.metrics() if re.fullmatch(r"rollouts/staleness_\d+", name)),
        key=lambda name: (len(name), name),
    )
    # A resumed run may have other ages from then on.
    rows = [row for row in run.steps() if metrics and metrics[0] in row]
    layers = {name.rpartition("_")[2]: [row.get(name, 0.0) for row in rows] for name in metrics}
    drawn = {age: layer for age, layer in layers.items() if any(layer)}
    return _stacked(title, [row["step"] for row in rows], drawn) if len(rows) > 1 else None


def _stacked(title: str, steps: Sequence[float], layers: Mapping[str, Sequence[float]]) -> Drawing:
    """Layers by name, each with its share of all in the label."""
    total = sum(map(sum, layers.values()))
    lines, low = list[Line](), [0.0] * len(steps)
    for number, (name, layer) in enumerate(layers.items()):
        high = [below + value for below, value in zip(low, layer, strict=True)]
        colour = _OTHER if name == "other" else COLOURS[number % len(COLOURS)]
        label = f"{name} {sum(layer) / total:.0%}"
        lines.append(Line(label, colour, steps, _rounded(layer), low=_rounded(low), high=_rounded(high)))
        low = high
    return Drawing(title, "", lines, at_least=0.0, stacked=True)


def _rounded(values: Sequence[float]) -> list[float | None]:
    """Rounds to five digits; None for what is no number, which JSON cannot hold."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def _together(series: Sequence[tuple[list[int], list[float]]]) -> tuple[list[int], list[list[float]]]:
    """Steps that all runs have which have the metric at all, and the runs' values at each."""
    known = [dict(zip(*one, strict=True)) for one in series if one[0]]
    steps = sorted(set.intersection(*(set(one) for one in known))) if known else []
    return steps, [[one[step] for one in known] for step in steps]


def _label(seeds: Sequence[RunRecord], metric: str, kinds: int, metrics: int) -> str:
    name = seeds[0].name if len(seeds) == 1 else f"{recipe_name(seeds[0])}, {len(seeds)} seeds"
    short = metric.removeprefix("eval/").removeprefix("reward/").removeprefix("conversation/")
    return name if metrics == 1 else short if kinds == 1 else f"{name}: {short}"


def _running_mean(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, unbiased at the start; not-a-number is passed over."""
    mean, norm, out = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(mean / norm if norm else math.nan)
    return out
