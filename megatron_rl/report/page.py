"""The HTML page: one file, no scripts from elsewhere, readable in a mail or on a cluster's file browser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import yaml

from megatron_rl.report import charts
from megatron_rl.report.charts import CHARTS, COLOURS, curves, draw, draw_time
from megatron_rl.report.findings import find
from megatron_rl.report.html import document, section, table, text
from megatron_rl.report.run import RolloutRow, RunRecord, by_recipe, differing_keys
from megatron_rl.report.viewer import STYLE, image_data, turns, viewer

_STYLE = """
ul.findings { list-style: none; padding: 0 }
ul.findings li { margin: .25rem 0 }
.tag { display: inline-block; width: 3.4rem; font-size: .75rem; font-weight: 700; text-transform: uppercase }
.dot { font-size: 1.2em }
details.group > summary .sub { font-weight: 400 }
details.more { margin: 0 } details.more > summary { font-weight: 400; font-size: .8rem; color: var(--soft) }
details.more[open] > summary { display: none }
div.scroll { overflow-x: auto } div.scroll td { max-width: 24rem; overflow-wrap: anywhere }
td.text { width: 100%; min-width: 20rem }
"""
_HELP = (
    '<p class="sub">Under the mouse: values of that step, in all charts. Drag: these steps only. Double click: all steps.</p>'
    '<noscript><p class="look">The charts and the list of all sampled rollouts need scripts.</p></noscript>'
)
_TIME = "Seconds per step, by phase"
_SHOWN = 8  # rollouts of a group
_LONG = 700  # characters of a text that are seen at once


def render(runs: Sequence[RunRecord]) -> str:
    """The page for one run, or for several side by side."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    parts = [f"<h1>{text(title)}</h1>", *_heads(runs)]
    parts += section("Findings", _findings(runs))
    parts += section("Numbers", [_numbers(runs)])
    drawn = [drawing for chart in CHARTS if (drawing := draw(chart, runs))]
    parts += section("Curves", [_HELP, *curves(drawn, 0)] if drawn else [])
    times = [draw_time(run, f"{_TIME}: {run.name}" if len(runs) > 1 else _TIME) for run in runs]
    parts += section("Where the time went", curves([drawing for drawing in times if drawing], 1))
    parts.append(charts.script())
    if len(runs) > 1:
        parts += section("Where the recipes differ", [_differences(runs)])
    parts += section("Rollouts", _rollouts(runs))
    parts += section("All sampled rollouts", viewer(runs))
    recipes = [(run.name, yaml.safe_dump(run.recipe, sort_keys=False)) for run in runs]
    folded = "<details><summary>{}</summary><pre>{}</pre></details>"
    parts += section("Recipes", [folded.format(text(name), text(recipe)) for name, recipe in recipes])
    return document(title, charts.STYLE + STYLE + _STYLE, parts)


def _heads(runs: Sequence[RunRecord]) -> Iterable[str]:
    kinds = by_recipe(runs)
    for run in runs:
        colour = COLOURS[next(i for i, seeds in enumerate(kinds) if run in seeds) % len(COLOURS)]
        last, model = run.rows[-1], run.recipe.get("model", {})
        what = [
            f"{run.recipe.get('algorithm', {}).get('preset')} on {model.get('path') or 'a model made at start-up'}",
            f"step {last['step']} of {run.recipe.get('trainer', {}).get('steps')}",
            f"{_duration(sum(row.get('timing_s/step', 0.0) for row in run.rows))} in RL steps",
        ]
        if run.attempts > 1:
            what.append(f"{run.attempts} attempts")
        mark = f'<span class="dot" style="color:{colour}">●</span> {text(run.name)}: ' if len(runs) > 1 else ""
        yield f'<p class="sub">{mark}{text("; ".join(what))}; {text(str(run.path))}</p>'


def _findings(runs: Sequence[RunRecord]) -> list[str]:
    parts = []
    for run in runs:
        items = "".join(
            f'<li><span class="tag {finding.level}">{finding.level}</span> {text(finding.text)}</li>'
            for finding in find(run)
        )
        parts.append(_named(run, f'<ul class="findings">{items or "<li>nothing to point at</li>"}</ul>', len(runs)))
    return parts


def _numbers(runs: Sequence[RunRecord]) -> str:
    """Evaluations and reward: first, best, last of each run, and the mean of runs that differ in the seed only."""
    names = [
        name
        for name in dict.fromkeys(name for run in runs for name in run.metrics())
        if (name.startswith("eval/") and "/reward/" not in name) or name == "reward/mean"
    ]
    head = ["metric", *(["run"] if len(runs) > 1 else []), "first", "best", "last"]
    rows = []
    for name in sorted(names):
        for seeds in by_recipe(runs):
            found = [(run.name, values) for run in seeds if (values := run.series(name)[1])]
            numbers = [[values[0], max(values), values[-1]] for _, values in found]
            cells = [(run, [_number(value) for value in own]) for (run, _), own in zip(found, numbers, strict=True)]
            if len(found) > 1:
                means = [f"{fmean(column):.4g} ± {stdev(column):.2g}" for column in zip(*numbers, strict=True)]
                cells.append((f"mean ± deviation of {len(found)} seeds", means))
            for run, (first, best, last) in cells:
                shown = [first, best if "@" in name or "reward" in name else "", last]
                rows.append([name, *([run] if len(runs) > 1 else []), *shown])
    return f'<div class="scroll">{table(head, rows, numbers=3)}</div>'


def _differences(runs: Sequence[RunRecord]) -> str:
    rows = [[key, *map(str, values)] for key, values in differing_keys(runs).items()]
    if not rows:
        return "<p>Only in run_dir.</p>"
    return f'<div class="scroll">{table(["key", *(run.name for run in runs)], rows)}</div>'


def _rollouts(runs: Sequence[RunRecord]) -> list[str]:
    parts = []
    for run in runs:
        groups = [_group_of(run, group, why) for group, why in chosen_groups(run.samples)]
        if groups:
            parts.append(_named(run, "".join(groups), len(runs)))
    return parts


def _group_of(run: RunRecord, group: Group, why: Sequence[str]) -> str:
    """One prompt with its responses, folded."""
    columns = list(group.rollouts[0]["rewards"])
    head = "".join(f"<th>{text(name)}</th>" for name in ("response", *columns, "advantage", "tokens", "ended by"))
    rows = []
    for rollout in group.rollouts[:_SHOWN]:
        cells = [_number(rollout["rewards"].get(column)) for column in columns]
        cells += [
            _number(rollout.get("advantage")),
            str(rollout["tokens"]),
            text(str(rollout.get("finish_reason", ""))),
        ]
        response = f'<td class="text">{_long(rollout["response"])}</td>'
        rows.append(f"<tr>{response}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    first = group.rollouts[0]
    images = "".join(
        f'<img src="{data}" alt="">' for name in first.get("images", ()) if (data := image_data(run.path, name))
    )
    asked = images + "".join(
        (f'<div class="role">{text(role)}</div>' if role else "") + _long(said) for role, said in turns(first["prompt"])
    )
    facts = f"reward {_number(group.reward)}, up to {group.longest} tokens, {len(group.rollouts)} rollouts"
    return (
        f'<details class="group"><summary>Step {group.step}: {text(", ".join(why))} '
        f'<span class="sub">{facts}</span></summary>'
        f'{asked}<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div></details>'
    )


def _long(given: str) -> str:
    """A text, cut with a button for the rest where it is long."""
    if len(given) <= _LONG:
        return f"<pre>{text(given)}</pre>"
    return (
        f'<pre>{text(given[:_LONG])}</pre><details class="more"><summary>… show all {len(given):,} characters</summary>'
        f"<pre>{text(given[_LONG:])}</pre></details>"
    )


# ------------------------------------------------------------------------------------------------------------- pieces
def _named(run: RunRecord, content: str, runs: int) -> str:
    return content if runs == 1 else f"<h3>{text(run.name)}</h3>{content}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt in one step, as far as they were written."""

    step: int
    rollouts: Sequence[RolloutRow]

    @property
    def reward(self) -> float:
        """Mean over rollouts of the sum of all reward columns; a score that never came counts as 0."""
        return fmean(sum(value or 0.0 for value in rollout["rewards"].values()) for rollout in self.rollouts)

    @property
    def longest(self) -> int:
        return max(rollout["tokens"] for rollout in self.rollouts)

    @property
    def cut(self) -> int:
        """Rollouts that ended at the token limit."""
        return sum(rollout.get("finish_reason") == "length" for rollout in self.rollouts)


def groups_of(samples: Mapping[int, Sequence[RolloutRow]]) -> list[Group]:
    """The groups of every step, in order. Rows of old runs have no sample id: their prompt tells them apart."""
    found = []
    for step, rows in samples.items():
        by_prompt: dict[str, list[RolloutRow]] = {}
        for row in rows:
            by_prompt.setdefault(str(row.get("sample", row["prompt"])), []).append(row)
        found += [Group(step, rollouts) for rollouts in by_prompt.values()]
    return found


def chosen_groups(samples: Mapping[int, Sequence[RolloutRow]]) -> list[tuple[Group, list[str]]]:
    """A handful of groups with why each was chosen, in the order of their steps.

    The first of the first, middle and last step; and of all the one with the highest and the lowest reward, the one with the
    longest response, and the one with most responses cut at the token limit, the latest where several are equal.
    """
    groups = groups_of(samples)
    if not groups:
        return []
    steps = sorted({group.step for group in groups})
    first_of = {group.step: group for group in reversed(groups)}
    wanted = [(first_of[steps[0]], "first step")]
    if len(steps) > 2:
        wanted.append((first_of[steps[len(steps) // 2]], "middle"))
    if len(steps) > 1:
        wanted.append((first_of[steps[-1]], "last step"))
    latest = groups[::-1]  # max takes the first of equal ones
    wanted.append((max(latest, key=lambda group: group.reward), "highest reward"))
    wanted.append((min(latest, key=lambda group: group.reward), "lowest reward"))
    wanted.append((max(latest, key=lambda group: group.longest), "longest response"))
    most_cut = max(latest, key=lambda group: group.cut)
    if most_cut.cut:
        wanted.append((most_cut, "cut at the token limit"))
    reasons: dict[int, tuple[Group, list[str]]] = {}
    for group, why in wanted:
        reasons.setdefault(id(group), (group, []))[1].append(why)
    return sorted(reasons.values(), key=lambda item: item[0].step)
