"""Charts as SVG text, drawn by matplotlib. One line per run and metric; colours tell runs apart, dashes metrics. Runs of one
recipe with several seeds are one line, their mean, in a band from the lowest to the highest."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from megatron_rl.report.run import RunRecord, by_recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    *("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f"),
    *("#78350f", "#f472b6", "#1e3a8a", "#a3e635", "#fbbf24", "#0f766e", "#c4b5fd", "#fb7185"),
)
_DASHES = ("-", "--", ":", "-.")
_MARKS = 150  # most points of a line that show their value
_MANY = 60  # points from which on the raw line is faint and a running mean is drawn over it


@dataclass(frozen=True)
class Chart:
    """`metrics` may end in `*` for every metric that starts so; drawn only where some run has one of them.

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
)


def matching(chart: Chart, runs: Sequence[RunRecord]) -> list[str]:
    """The metrics of the chart that some run has. Of evaluations only the scores, of reward columns not the statistics."""
    present = sorted({name for run in runs for name in run.metrics()})
    found = []
    for pattern in chart.metrics:
        if pattern == "eval/*":
            found += [name for name in present if name.startswith("eval/") and "@" in name.rpartition("/")[2]]
        elif pattern == "reward/*":
            found += [
                name for name in present if name.startswith("reward/") and name not in ("reward/mean", "reward/std")
            ]
        elif pattern.endswith("*"):
            named = (name for name in present if name.startswith(pattern[:-1]))
            found += sorted(named, key=lambda name: (len(name), name))  # numbers at their ends in order
        elif pattern in present:
            found.append(pattern)
    # Greedy decoding has one number under two names.
    return [name for name in found if not (name.endswith("/pass@1") and name.replace("/pass@1", "/avg@1") in found)]


def draw(chart: Chart, runs: Sequence[RunRecord]) -> str | None:
    """The chart as an <svg> element, or None where no run has its metrics."""
    metrics = matching(chart, runs)
    if not metrics:
        return None
    figure, axes = _figure(4.6, 2.7)
    marks: list[Mark] = []
    kinds = by_recipe(runs)
    for i, seeds in enumerate(kinds):
        for j, metric in enumerate(metrics):
            steps, all_values = _together([run.series(metric) for run in seeds])
            if not steps:
                continue
            label = _label(seeds, metric, len(kinds), len(metrics))
            colour = COLOURS[(i if len(kinds) > 1 else j) % len(COLOURS)]
            dash = _DASHES[j % len(_DASHES)] if len(kinds) > 1 else "-"
            values = [fmean(of_step) for of_step in all_values]
            if len(seeds) > 1:
                ends = [min(of_step) for of_step in all_values], [max(of_step) for of_step in all_values]
                axes.fill_between(steps, *ends, color=colour, alpha=0.18, linewidth=0)
            _line(axes, steps, values, colour, dash, label)
            marks += _point_marks(label, steps, values)
    if chart.log and all(value > 0 for run in runs for metric in metrics for value in run.series(metric)[1]):
        axes.set_yscale("log")
    elif chart.at_least is not None:
        axes.set_ylim(0, max(chart.at_least, axes.get_ylim()[1]))
    drawn = {mark.x for mark in marks}
    if len(drawn) == 1:  # else the axis has fractions of a step
        axes.set_xlim(min(drawn) - 1, min(drawn) + 1)
    axes.set_title(chart.title, fontsize=10, loc="left", fontweight="bold")
    if len(kinds) > 1 or len(metrics) > 1:
        axes.legend(fontsize=7, frameon=False)
    if len(metrics) == 1:
        axes.set_title(metrics[0], fontsize=7, loc="right", color="#94a3b8")
    return _svg(figure, axes, marks)


def draw_time(run: RunRecord) -> str | None:
    """Seconds of each step by phase, stacked."""
    phases = [name for name in run.metrics() if name.startswith("timing_s/") and name != "timing_s/step"]
    rows = [row for row in run.steps() if "timing_s/step" in row]
    if not phases or len(rows) < 2:
        return None
    figure, axes = _figure(9.4, 2.9)
    steps = [row["step"] for row in rows]
    order = sorted(phases, key=lambda name: -sum(row.get(name, 0.0) for row in rows))
    layers = [[row.get(name, 0.0) for row in rows] for name in order]
    other = [max(0.0, row["timing_s/step"] - sum(row.get(name, 0.0) for name in order)) for row in rows]
    total = sum(row["timing_s/step"] for row in rows)
    labels = [f"{n.removeprefix('timing_s/')} {sum(layer) / total:.0%}" for n, layer in zip(order, layers, strict=True)]
    axes.stackplot(
        steps,
        *layers,
        other,
        labels=[*labels, f"other {sum(other) / total:.0%}"],
        colors=[*(COLOURS[i % len(COLOURS)] for i in range(len(layers))), "#cbd5e1"],
        alpha=0.85,
    )
    axes.set_title("Seconds per step, by phase", fontsize=10, loc="left", fontweight="bold")
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    marks = []
    for row in rows[:: -(-len(rows) // _MARKS)]:
        parts = ", ".join(f"{name.removeprefix('timing_s/')} {row[name]:.3g}" for name in order if name in row)
        marks.append(
            Mark(row["step"], row["timing_s/step"], f"step {row['step']}: {row['timing_s/step']:.3g} s ({parts})")
        )
    return _svg(figure, axes, marks)


@dataclass(frozen=True)
class Mark:
    """A place in a chart, in the data's units, with what is shown while the mouse is over it."""

    x: float
    y: float
    text: str


def _point_marks(label: str, steps: Sequence[int], values: Sequence[float]) -> list[Mark]:
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return [
        Mark(step, value, f"{label}, step {step}: {value:.4g}") for step, value in points[:: -(-len(points) // _MARKS)]
    ]


def _together(series: Sequence[tuple[list[int], list[float]]]) -> tuple[list[int], list[list[float]]]:
    """Steps that all runs have which have the metric at all, and the runs' values at each."""
    known = [dict(zip(*one, strict=True)) for one in series if one[0]]
    steps = sorted(set.intersection(*(set(one) for one in known))) if known else []
    return steps, [[one[step] for one in known] for step in steps]


def _label(seeds: Sequence[RunRecord], metric: str, kinds: int, metrics: int) -> str:
    name = seeds[0].name if len(seeds) == 1 else f"{seeds[0].name}, {len(seeds)} seeds"
    short = metric.removeprefix("eval/").removeprefix("reward/")
    return name if metrics == 1 else short if kinds == 1 else f"{name}: {short}"


def _line(axes: Axes, steps: list[int], values: list[float], colour: str, dash: str, label: str) -> None:
    shown = [value if math.isfinite(value) else math.nan for value in values]
    if len(shown) < _MANY:
        axes.plot(steps, shown, dash, color=colour, linewidth=1.5, label=label, marker="." if len(shown) < 3 else None)
        return
    axes.plot(steps, shown, "-", color=colour, linewidth=0.6, alpha=0.3)
    axes.plot(steps, _running_mean(shown), dash, color=colour, linewidth=1.6, label=label)


def _running_mean(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, unbiased at the start; not-a-number is passed over."""
    mean, norm, out = 0.0, 0.0, []
    for value in values:
        if not math.isnan(value):
            mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(mean / norm if norm else math.nan)
    return out


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    # Text stays text; the same run gives the same page.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "megatron-rl", "font.family": "sans-serif"}
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.grid(True, color="#94a3b8", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7, color="#94a3b8")
    axes.set_xlabel("step", fontsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#94a3b8")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _svg(figure: Figure, axes: Axes, marks: Sequence[Mark]) -> str:
    """The figure as text, with an unseen circle over each mark: browsers show its title under the mouse, without a script."""
    from matplotlib import pyplot

    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    places: Iterable[tuple[float, float]] = []
    if marks:
        places = axes.transData.transform([(mark.x, mark.y) for mark in marks]) * 72 / figure.dpi
    height = 72 * figure.get_figheight()
    pyplot.close(figure)
    circles = "".join(
        f'<circle class="mark" cx="{x:.1f}" cy="{height - y:.1f}" r="5"><title>{html.escape(mark.text)}</title></circle>'
        for mark, (x, y) in zip(marks, places, strict=True)
    )
    text = out.getvalue()
    return text[text.index("<svg") : text.rindex("</svg>")] + circles + "</svg>"
