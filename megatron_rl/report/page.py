"""The HTML page: one file, no scripts from elsewhere, readable in a mail or on a cluster's file browser."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import yaml

from megatron_rl.config.presets import PRESETS
from megatron_rl.report import charts
from megatron_rl.report.charts import CHARTS, COLOURS, WARM_UP_CHARTS, curves, draw, draw_staleness, draw_time
from megatron_rl.report.findings import find
from megatron_rl.report.html import document, section, table, text
from megatron_rl.report.run_record import (
    RolloutRow,
    RunRecord,
    by_prompt,
    by_recipe,
    differing_keys,
    recipe_name,
    shown_evaluations,
)
from megatron_rl.report.significance import effects_note, recipe_differences
from megatron_rl.report.status import duration
from megatron_rl.report.viewer import STYLE, image_data, response_text, turns, viewer

_STYLE = """
div.top { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); gap: 0 2.5rem }
div.top > div { min-width: 0 }
ul.findings { list-style: none; padding: 0 }
ul.findings li { margin: .25rem 0 }
.tag { display: inline-block; width: 3.4rem; font-size: .75rem; font-weight: 700; text-transform: uppercase }
.dot { font-size: 1.2em }
details.group > summary .sub { font-weight: 400 }
details.more { margin: 0 } details.more > summary { font-weight: 400; font-size: .8rem; color: var(--soft) }
details.more[open] > summary { display: none }
div.scroll { overflow-x: auto } div.scroll td { max-width: 24rem; overflow-wrap: break-word }
td.text { width: 100%; min-width: 20rem }
"""
_HELP = (
    '<p class="sub">Under the mouse: values of that step, in all charts. Drag: these steps only. Double click: all steps.</p>'
    '<noscript><p class="look">The charts and the list of all sampled rollouts need scripts.</p></noscript>'
)
_TIME = "Seconds per step, by phase"
_STALENESS = "Share of the tokens, by weight syncs since they were drawn"
_SHOWN = 8  # rollouts of a group
_LONG = 700  # characters of a text that are seen at once


def render(runs: Sequence[RunRecord], compared: Sequence[str] = ()) -> str:
    """The page for one run, or for several side by side. `compared`: the metrics whose differences are tested, as
    `recipe_differences` has them."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    sections = [f"<h1>{text(title)}</h1>", *_heads(runs)]
    top = [section("Findings", _findings(runs)), section("Numbers", [_numbers(runs)])]
    sections += ['<div class="top">', *(f"<div>{''.join(one)}</div>" for one in top), "</div>"]
    drawn = [drawing for chart in CHARTS if (drawing := draw(chart, runs))]
    sections += section("Curves", [_HELP, *curves(drawn, 0)] if drawn else [])
    times = [draw_time(run, _of(run, _TIME, runs)) for run in runs]
    ages = [draw_staleness(run, _of(run, _STALENESS, runs)) for run in runs]
    sections += section("Where the time went", curves([drawing for drawing in times if drawing], 1))
    sections += section("How old trained tokens are", curves([drawing for drawing in ages if drawing], 3))
    warm_ups = [warm_up for run in runs if (warm_up := run.warm_up()) is not None]
    warmed = [drawing for chart in WARM_UP_CHARTS if (drawing := draw(chart, warm_ups))]
    sections += section("The warm-up before RL", curves(warmed, 2, steps="warm-up"))
    sections.append(charts.script())
    if len(runs) > 1:
        sections += section("What difference the recipes made", _effects(runs, compared))
        sections += section("Where the recipes differ", [_differences(runs)])
    sections += section("Rollouts", _rollouts(runs))
    sections += section("All sampled rollouts", viewer(runs))
    recipes = [(run.name, yaml.safe_dump(run.recipe, sort_keys=False)) for run in runs]
    folded = "<details><summary>{}</summary><pre>{}</pre></details>"
    sections += section("Recipes", [folded.format(text(name), text(recipe)) for name, recipe in recipes])
    return document(title, charts.STYLE + STYLE + _STYLE, sections)


def _of(run: RunRecord, title: str, runs: Sequence[RunRecord]) -> str:
    return f"{title}: {run.name}" if len(runs) > 1 else title


def _heads(runs: Sequence[RunRecord]) -> Iterable[str]:
    kinds = by_recipe(runs)
    for run in runs:
        colour = COLOURS[next(i for i, seeds in enumerate(kinds) if run in seeds) % len(COLOURS)]
        what = [
            f"{_algorithm(run)} on {run.keys.get('model.path') or 'a model made at start-up'}",
            f"step {run.rows[-1]['step']} of {run.keys.get('trainer.steps')}",
            f"{duration(sum(row.get('timing_s/step', 0.0) for row in run.rows))} in RL steps",
        ]
        if run.attempts > 1:
            what.append(f"{run.attempts} attempts")
        mark = f'<span class="dot" style="color:{colour}">●</span> {text(run.name)}: ' if len(runs) > 1 else ""
        yield f'<p class="sub">{mark}{text("; ".join(what))}; {text(str(run.path))}</p>'


def _algorithm(run: RunRecord) -> str:
    """The preset; and the estimator and the surrogate, where they are others than the preset's."""
    preset = str(run.keys.get("algorithm.preset", ""))
    usual = PRESETS.get(preset, {})
    other = []
    for part in ("estimator", "surrogate"):
        name, theirs = run.keys.get(f"algorithm.{part}.name"), usual.get(part)
        if name is not None and not (isinstance(theirs, dict) and theirs.get("name") == name):
            other.append(f"{part} {name}")
    return f"{', '.join(other)}, else as {preset}," if other else preset


def _findings(runs: Sequence[RunRecord]) -> list[str]:
    lists = []
    for run in runs:
        items = "".join(
            f'<li><span class="tag {finding.level}">{finding.level}</span> {text(finding.text)}</li>'
            for finding in find(run)
        )
        lists.append(_named(run, f'<ul class="findings">{items or "<li>nothing to point at</li>"}</ul>', len(runs)))
    return lists


def _numbers(runs: Sequence[RunRecord]) -> str:
    """Evaluations and reward: first, best, last of each run, and the mean of runs that differ in the seed only."""
    every = list(dict.fromkeys(name for run in runs for name in run.metrics()))
    names = [
        name
        for name in shown_evaluations(every) + [name for name in every if name == "reward/mean"]
        if "/reward/" not in name
    ]
    head = ["metric", *(["run"] if len(runs) > 1 else []), "first", "best", "last"]
    rows = []
    for name in sorted(names):
        for seeds in by_recipe(runs):
            found = [(run.name, values) for run in seeds if (values := run.series(name)[1])]
            numbers = [[values[0], max(values), values[-1]] for _, values in found]
            cells = [(run.name, _with_errors(run, name)) for run in seeds if run.series(name)[1]]
            if len(found) > 1:
                means = [f"{fmean(column):.4g} ± {stdev(column):.2g}" for column in zip(*numbers, strict=True)]
                cells.append((f"mean ± deviation of {len(found)} seeds", means))
            for run, (first, best, last) in cells:
                shown = [first, best if "@" in name or "reward" in name else "", last]
                rows.append([name.removeprefix("eval/"), *([run] if len(runs) > 1 else []), *shown])
    return f'<div class="scroll">{table(head, rows, numbers=3)}</div>'


def _with_errors(run: RunRecord, name: str) -> list[str]:
    """First, best and last value, each with its standard error where the run has one."""
    steps, values = run.series(name)
    errors = run.errors(name)
    best = values.index(max(values))
    return [
        f"{values[i]:.3f} ± {errors[steps[i]]:.3f}" if steps[i] in errors else _number(values[i])
        for i in (0, best, len(values) - 1)
    ]


def _differences(runs: Sequence[RunRecord]) -> str:
    """Shows a column per recipe: of several seeds that of the first."""
    runs = [seeds[0] for seeds in by_recipe(runs)]
    rows = [
        [key, *("–" if value in (None, {}) else str(value) for value in values)]
        for key, values in differing_keys(runs).items()
    ]
    if not rows:
        return "<p>Only in run_dir.</p>"
    return f'<div class="scroll">{table(["key", *map(recipe_name, runs)], rows)}</div>'


def _effects(runs: Sequence[RunRecord], metrics: Sequence[str]) -> list[str]:
    effects = recipe_differences(runs, metrics)
    head = ["metric", "recipe", "mean", "difference", "95 % interval", "p", "seeds"]
    rows = []
    for effect in effects:
        by = effect.difference
        interval = "" if by.interval is None else f"{by.interval[0]:+.3g} to {by.interval[1]:+.3g}"
        numbers = [f"{effect.means[1]:.4g}", f"{by.mean:+.3g}", interval, f"{by.p:.2g}", str(by.pairs)]
        rows.append([effect.metric.removeprefix("eval/"), effect.second, *numbers])
    if not rows:
        return []
    return [
        f'<div class="scroll">{table(head, rows, numbers=5)}</div>',
        f'<p class="sub">{text(effects_note(effects))}</p>',
    ]


def _rollouts(runs: Sequence[RunRecord]) -> list[str]:
    parts = []
    for run in runs:
        groups = [_group_of(run, group, why) for group, why in chosen_groups(run)]
        if groups:
            parts.append(_named(run, "".join(groups), len(runs)))
    return parts


def _group_of(run: RunRecord, group: PromptGroup, why: Sequence[str]) -> str:
    """One prompt with its responses, folded."""
    columns = list(group.rollouts[0]["rewards"])
    names = (*columns, "advantage", "tokens", "ended by")
    head = "<th>response</th>" + "".join(f'<th class="n">{text(name)}</th>' for name in names)
    rows = []
    for rollout in group.rollouts[:_SHOWN]:
        cells = [_number(rollout["rewards"].get(column)) for column in columns]
        cells += [
            _number(rollout.get("advantage")),
            str(rollout["tokens"]),
            text(str(rollout.get("finish_reason", ""))),
        ]
        response = f'<td class="text">{_long(response_text(rollout))}</td>'
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        rows.append(f"<tr>{response}{numbers}</tr>")
    first = group.rollouts[0]
    images = "".join(
        f'<img src="{data}" alt="">' for name in first.get("images", ()) if (data := image_data(run.path, name))
    )
    prompt = images + "".join(
        (f'<div class="role">{text(role)}</div>' if role else "") + _long(said) for role, said in turns(first["prompt"])
    )
    facts = f"reward {_number(group.reward)}, up to {group.longest} tokens, {len(group.rollouts)} rollouts"
    return (
        f'<details class="group"><summary>Step {group.step}: {text(", ".join(why))} '
        f'<span class="sub">{facts}</span></summary>'
        f'{prompt}<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div></details>'
    )


def _long(content: str) -> str:
    """A text, cut with a button for the rest where it is long."""
    if len(content) <= _LONG:
        return f"<pre>{text(content)}</pre>"
    return (
        f'<pre>{text(content[:_LONG])}</pre><details class="more"><summary>… show all {len(content):,} characters</summary>'
        f"<pre>{text(content[_LONG:])}</pre></details>"
    )


# ------------------------------------------------------------------------------------------------------------- pieces
def _named(run: RunRecord, content: str, runs: int) -> str:
    return content if runs == 1 else f"<h3>{text(run.name)}</h3>{content}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


@dataclass(frozen=True)
class PromptGroup:
    """The rollouts of one prompt in one step, as far as they were written."""

    step: int
    rollouts: Sequence[RolloutRow]
    reward: float  # mean over the rollouts of the columns' weighted sum

    @property
    def longest(self) -> int:
        return max(rollout["tokens"] for rollout in self.rollouts)

    @property
    def cut(self) -> int:
        """Rollouts that ended at the token limit."""
        return sum(rollout.get("finish_reason") == "length" for rollout in self.rollouts)


def groups_of(run: RunRecord) -> list[PromptGroup]:
    """The groups of every step, in order."""
    return [
        PromptGroup(step, rollouts, fmean(run.rewards(rollouts)))
        for step, rows in run.samples.items()
        for rollouts in by_prompt(rows)
    ]


def chosen_groups(run: RunRecord) -> list[tuple[PromptGroup, list[str]]]:
    """A handful of groups with why each was chosen, in the order of their steps.

    The first of the first, middle and last step; and of all the one with the highest and the lowest reward, the one with the
    longest response, and the one with most responses cut at the token limit, the latest where several are equal.
    """
    groups = groups_of(run)
    if not groups:
        return []
    steps = sorted({group.step for group in groups})
    first_of = {group.step: group for group in reversed(groups)}
    chosen = [(first_of[steps[0]], "first step")]
    if len(steps) > 2:
        chosen.append((first_of[steps[len(steps) // 2]], "middle"))
    if len(steps) > 1:
        chosen.append((first_of[steps[-1]], "last step"))
    latest = groups[::-1]  # max takes the first of equal ones
    chosen.append((max(latest, key=lambda group: group.reward), "highest reward"))
    chosen.append((min(latest, key=lambda group: group.reward), "lowest reward"))
    chosen.append((max(latest, key=lambda group: group.longest), "longest response"))
    most_cut = max(latest, key=lambda group: group.cut)
    if most_cut.cut:
        chosen.append((most_cut, "cut at the token limit"))
    reasons: dict[int, tuple[PromptGroup, list[str]]] = {}
    for group, why in chosen:
        reasons.setdefault(id(group), (group, []))[1].append(why)
    return sorted(reasons.values(), key=lambda item: item[0].step)
