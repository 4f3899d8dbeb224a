"""The page's list of all sampled rollouts, to search, filter and sort, with images, what rewards say, and coloured tokens
(viewer.js)."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_rl.base.messages import ConfigError, errors_named
from megatron_rl.report.html import script_data
from megatron_rl.report.run_record import RolloutRow, RunRecord, by_prompt
from megatron_rl.runtime.arrays import read_arrays

STYLE = """
#viewer .bar { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; margin: .6rem 0 }
#viewer input { flex: 1 1 16rem } #viewer input, #viewer select { font: inherit; font-size: .85rem; padding: .2rem .4rem }
#viewer .panes { display: grid; grid-template-columns: minmax(0, 9fr) minmax(0, 11fr); gap: 1rem }
#viewer .list { height: 34rem } #viewer .detail { height: calc(34rem + 26px) }
#viewer .list, #viewer .detail { box-sizing: border-box; overflow: auto; border: 1px solid var(--line); border-radius: 6px }
#viewer .list > div { position: relative } #viewer .detail { padding: .6rem .8rem }
#viewer .line { position: absolute; left: 0; right: 0; height: 26px; display: grid; gap: .6rem; padding: 0 .6rem; border: 0;
  grid-template-columns: 3rem 3.5rem 4.5rem 3.5rem 1fr; align-items: center; text-align: right; cursor: pointer;
  font: .8rem/26px ui-monospace, monospace; color: var(--ink); background: none; width: 100% }
#viewer .line span { overflow: hidden; white-space: nowrap; text-overflow: ellipsis }
#viewer .line span:last-child { text-align: left }
#viewer .line.good, #viewer .line:hover, #viewer .line.chosen { background: var(--box) }
#viewer .head { position: static; color: var(--soft); cursor: default }
#viewer .good { color: var(--good) } #viewer .bad { color: var(--bad) }
#viewer .remarks { list-style: none; padding: 0; margin: .2rem 0 .8rem; font: .8rem/1.5 ui-monospace, monospace }
#viewer .remarks li { white-space: pre-wrap; overflow-wrap: anywhere }
.role { font-size: .72rem; color: var(--soft); text-transform: uppercase; letter-spacing: .04em; margin-top: .5rem }
#viewer .detail b { display: block; margin-top: .8rem }
details.group img, #viewer .detail img { display: block; max-width: min(100%, 24rem); min-height: 5rem; max-height: 20rem;
  margin: .4rem 0 }
@media (max-width: 800px) { #viewer .panes { grid-template-columns: minmax(0, 1fr) } #viewer .list { height: 15rem } }
"""

_COLOURS = (
    ("difference", "trainer's log-prob − engine's"),
    ("ratio", "ratio of the update"),
    ("weight", "weight in the gradient"),
)
_ARRAYS = ("log_probs", "old_log_probs", "rollout_log_probs")
_IMAGE_BYTES = 12 * 2**20  # of all images in the list, at most


def viewer(runs: Sequence[RunRecord]) -> list[str]:
    """The section's parts; [] without samples. Without scripts only the groups above are seen."""
    prompts: dict[str, int] = {}
    rows = [
        {
            **_facts(row),
            "run": number,
            "step": step,
            "prompt": prompts.setdefault(_prompt(row), len(prompts)),
            "reward": rewards[id(row)],
            **values,
        }
        for number, run in enumerate(runs)
        for step, of_step in run.samples.items()
        for rewards in [_rewards(run, of_step)]
        for row, values in zip(of_step, _token_values(run.path, step, of_step), strict=True)
    ]
    if not rows:
        return []
    data = {
        "runs": [run.name for run in runs],
        "prompts": [json.loads(prompt) for prompt in prompts],
        "images": _images(runs),
        "rows": rows,
    }
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
        script_data("rollouts", _as_json(data)) + f"<script>{script}</script>",
    ]


def _as_json(data: object) -> str:
    """Writes JSON with null for numbers that it has not: a ratio that overflowed, say."""
    with contextlib.suppress(ValueError):
        return json.dumps(data, default=str, allow_nan=False)
    return json.dumps(_finite(data), default=str)


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def turns(prompt: str | Sequence[Mapping[str, object]]) -> list[tuple[str, str]]:
    """Role and text of each turn; a prompt of text is one turn without a role. What a turn has besides is JSON behind it."""
    if isinstance(prompt, str):
        return [("", prompt)]
    spoken = list[tuple[str, str]]()
    for message in prompt:
        content = message.get("content")
        said = [content] if isinstance(content, str) and content else []
        more = {key: value for key, value in message.items() if key not in ("role", "content") and value}
        if content and not isinstance(content, str):
            more["content"] = content
        said += [json.dumps(more, ensure_ascii=False, indent=1)] if more else []
        spoken.append((str(message.get("role", "")), "\n".join(said)))
    return spoken


def response_text(row: RolloutRow) -> str:
    """Text after the prompt: the response, or the turns of a conversation, each after its role."""
    if "conversation" not in row:
        return row["response"]
    return "\n".join(f"{role}: {said}" for role, said in turns(row["conversation"]))


def image_data(run: Path, name: str) -> str:
    """An image of `samples/images` as a data URI; empty where it is not there any more."""
    file = (run / "samples" / "images" / Path(name).name).resolve()
    is_own = file.is_relative_to(run.resolve()) and file.is_file()  # a link may lead anywhere
    return f"data:image/webp;base64,{base64.b64encode(file.read_bytes()).decode()}" if is_own else ""


def _images(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Returns images by file name; as many as the page may hold, those of the latest steps first."""
    encoded, size = dict[str, str](), 0
    steps = sorted(((step, run) for run in runs for step in run.samples), key=lambda one: -one[0])
    for step, run in steps:
        for name in dict.fromkeys(name for row in run.samples[step] for name in row.get("images", ())):
            if name not in encoded and (data := image_data(run.path, name)) and size + len(data) <= _IMAGE_BYTES:
                encoded[name], size = data, size + len(data)
    return encoded


def _rewards(run: RunRecord, rows: Sequence[RolloutRow]) -> dict[int, float]:
    """Returns each rollout's weighted sum by the row's identity."""
    groups = by_prompt(rows)
    return {
        id(row): float(f"{reward:.6g}")
        for group in groups
        for row, reward in zip(group, run.rewards(group), strict=True)
    }


def _prompt(row: RolloutRow) -> str:
    return json.dumps(turns(row["prompt"]))


def _facts(row: RolloutRow) -> dict[str, object]:
    answer = row.get("answer")
    text = answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer, default=str)
    facts = {**row, "answer": text, "finish_reason": row.get("finish_reason", "")}
    if "conversation" in row:
        facts["conversation"] = turns(row["conversation"])
    return facts


def _token_values(run: Path, step: int, rows: Sequence[RolloutRow]) -> list[Mapping[str, list[float]]]:
    """Returns for each rollout whose tokens were recorded values by token under the names of `_COLOURS`."""
    file = run / "rollouts" / f"step_{step}.npz"
    if not file.is_file() or not any("pieces" in row for row in rows):
        return [{} for _ in rows]
    with errors_named("", as_error=ConfigError):
        arrays = read_arrays(file, ("samples", "rewards"), "a recorded step")
        of_replicas = [
            read_arrays(path, ("rows", "lengths", *_ARRAYS), "a recorded step")
            for path in sorted(file.with_suffix(".tokens").glob("*.npz"))
        ]
    prompt_index = {sample: i for i, sample in enumerate(arrays["samples"].tolist())}
    count = arrays["rewards"].shape[1]
    known: dict[int, dict[str, list[float]]] = {}
    for recorded in of_replicas:
        new, old, drawn = (recorded[name] for name in _ARRAYS)
        weight = recorded.get("gradient_weights")  # runs of older versions have none
        ends = np.cumsum(recorded["lengths"])
        for row, begin, end in zip(recorded["rows"].tolist(), ends - recorded["lengths"], ends, strict=True):
            known[row] = {
                "difference": np.round(old[begin:end] - drawn[begin:end], 6).tolist(),
                "ratio": np.round(np.exp(new[begin:end] - old[begin:end]), 6).tolist(),
            }
            if weight is not None:
                known[row]["weight"] = [float(f"{one:.4g}") for one in weight[begin:end]]
    found = [known.get(prompt_index.get(row.get("sample", ""), -1) * count + row.get("rollout", 0), {}) for row in rows]
    return [
        values if len(row.get("pieces", ())) == len(values.get("ratio", ())) else {}
        for row, values in zip(rows, found, strict=True)
    ]
