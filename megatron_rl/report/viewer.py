"""The page's list of all sampled rollouts, to search, filter and sort; tokens coloured by their log-probs (viewer.js)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from megatron_rl.report.run import RolloutRow, RunRecord

STYLE = """
#viewer .bar { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; margin: .6rem 0 }
#viewer input { flex: 1 1 16rem } #viewer input, #viewer select { font: inherit; font-size: .85rem; padding: .2rem .4rem }
#viewer .panes { display: grid; grid-template-columns: minmax(0, 9fr) minmax(0, 11fr); gap: 1rem }
#viewer .list, #viewer .detail { height: 34rem; overflow: auto; border: 1px solid var(--line); border-radius: 6px }
#viewer .list > div { position: relative } #viewer .detail { padding: 0 .8rem }
#viewer .line { position: absolute; left: 0; right: 0; height: 26px; display: grid; gap: .6rem; padding: 0 .6rem; border: 0;
  grid-template-columns: 3rem 3.5rem 4.5rem 3.5rem 1fr; align-items: center; text-align: right; cursor: pointer;
  font: .8rem/26px ui-monospace, monospace; color: var(--ink); background: none; width: 100% }
#viewer .line span { overflow: hidden; white-space: nowrap; text-overflow: ellipsis }
#viewer .line span:last-child { text-align: left }
#viewer .line.good, #viewer .line:hover, #viewer .line.chosen { background: var(--box) }
#viewer .head { position: static; color: var(--soft); cursor: default }
"""
_COLOURS = (("difference", "trainer's log-prob − engine's"), ("ratio", "ratio of the update"))


def viewer(runs: Sequence[RunRecord]) -> list[str]:
    """The section's parts; [] without samples. Without scripts only the groups above are seen."""
    prompts: dict[str, int] = {}
    rows = [
        {**_facts(row), "run": number, "step": step, "prompt": prompts.setdefault(_prompt(row), len(prompts)), **values}
        for number, run in enumerate(runs)
        for step, of_step in run.samples.items()
        for row, values in zip(of_step, _token_values(run.path, step, of_step), strict=True)
    ]
    if not rows:
        return []
    data = json.dumps({"runs": [run.name for run in runs], "prompts": list(prompts), "rows": rows}, default=str)
    script = Path(__file__).with_name("viewer.js").read_text("utf-8")
    colours = "".join(f'<option value="{name}">{label}</option>' for name, label in _COLOURS)
    selects = "".join(
        f'<select name="{name}" title="{label}">{first}</select>'
        for name, label, first in (
            ("run", "run", '<option value="">all runs</option>'),
            ("step", "step", '<option value="">all steps</option>'),
            ("ended", "ended by", '<option value="">ended by any</option>'),
            ("sign", "advantage", '<option value="">any advantage</option>'),
            ("sort", "order", ""),
            ("colour", "tokens coloured by", f'<option value="">plain tokens</option>{colours}'),
        )
    )
    head = "".join(f"<span>{name}</span>" for name in ("step", "reward", "advantage", "tokens", "response"))
    return [
        '<div id="viewer" hidden><div class="bar"><input name="search" type="search" '
        f'placeholder="words in prompt, response or answer">{selects}<span class="count sub"></span></div>'
        f'<div class="panes"><div><div class="line head">{head}</div><div class="list"><div></div></div></div>'
        '<div class="detail"></div></div></div>',
        # In a script's text only `<` could end it.
        f'<script type="application/json" id="rollouts">{data.replace("<", chr(92) + "u003c")}</script>'
        f"<script>{script}</script>",
    ]


def _prompt(row: RolloutRow) -> str:
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else yaml.safe_dump(prompt, sort_keys=False, allow_unicode=True)


def _facts(row: RolloutRow) -> dict[str, object]:
    answer = row.get("answer")
    text = answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer, default=str)
    return {**row, "answer": text, "finish_reason": row.get("finish_reason", "")}


def _token_values(run: Path, step: int, rows: Sequence[RolloutRow]) -> list[Mapping[str, list[float]]]:
    """Of each rollout whose tokens were recorded: values by token under the names of `_COLOURS`."""
    file = run / "rollouts" / f"step_{step}.npz"
    if not file.is_file() or not any("pieces" in row for row in rows):
        return [{} for _ in rows]
    with np.load(file, allow_pickle=False) as arrays:
        place = {sample: i for i, sample in enumerate(arrays["samples"].tolist())}
        count = arrays["rewards"].shape[1]
    known: dict[int, Mapping[str, list[float]]] = {}
    for part in sorted(file.with_suffix(".tokens").glob("*.npz")):
        with np.load(part, allow_pickle=False) as arrays:
            new, old, drawn = (arrays[name] for name in ("log_probs", "old_log_probs", "rollout_log_probs"))
            ends = np.cumsum(arrays["lengths"])
            for row, begin, end in zip(arrays["rows"].tolist(), ends - arrays["lengths"], ends, strict=True):
                known[row] = {
                    "difference": np.round(old[begin:end] - drawn[begin:end], 6).tolist(),
                    "ratio": np.round(np.exp(new[begin:end] - old[begin:end]), 6).tolist(),
                }
    found = [known.get(place.get(row.get("sample", ""), -1) * count + row.get("rollout", 0), {}) for row in rows]
    return [
        values if len(row.get("pieces", ())) == len(values.get("ratio", ())) else {}
        for row, values in zip(rows, found, strict=True)
    ]
