"""Run folders as runs leave them, written by hand; and what a page holds."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

VOID = {"meta", "br", "input", "wbr"}


class Outline(HTMLParser):
    """Collects the text, and fails on tags that do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def write_run(folder: Path, rows: list[dict[str, Any]], recipe: dict[str, Any] | None = None) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "logs" / "attempt_1").mkdir(parents=True)
    preset = {"algorithm": {"preset": "grpo"}, "trainer": {"steps": 20}, "seed": 0, "run_dir": str(folder)}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(preset | (recipe or {})))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {
        "prompt": "1 < 2 & <b>?",
        "response": "</td><script>x",
        "rewards": {"right": 1.0},
        "advantage": 0.5,
        "tokens": 4,
    }
    (folder / "samples" / "step_5.jsonl").write_text(json.dumps(sample) + "\n")
    newest = json.dumps(sample | {"response": "the\u2028newest"}, ensure_ascii=False)  # no line ends at U+2028 in JSON
    (folder / "samples" / "step_10.jsonl").write_text(f"{newest}\n" * 2, encoding="utf-8")
    (folder / "samples" / "eval_sums_step_20.jsonl").write_text("not looked at")
    return folder


def healthy(count: int = 20, **more: list[float]) -> list[dict[str, Any]]:
    """Rows of a run that learns; `more`: metrics that deviate, with `__` for a slash."""
    rows: list[dict[str, Any]] = [{"step": 0, "time": 1.0, "eval/sums/avg@1": 0.25, "eval/sums/pass@1": 0.25}]
    for step in range(1, count + 1):
        rows.append(
            {
                "step": step,
                "time": 1.0 + step,
                "reward/mean": step / count,
                "reward/right": step / count,
                "reward_signal_share/right": 0.5,
                "groups/signal_share": 0.5,
                "response_length/truncated_share": 0.0,
                "actor/entropy": 1.0 / step,
                "actor/grad_norm_max": 1.0,
                "region_share/LN": 0.01,
                "region_share/HP": 0.01,
                "mismatch/abs_log_ratio": 1e-6,
                "timing_s/step": 2.0,
                "timing_s/generate": 1.25,
                "timing_s/update": 0.5,
            }
        )
    rows[-1] |= {"eval/sums/avg@1": 0.75, "eval/sums/pass@1": 0.75}
    for name, values in more.items():
        for row, value in zip(rows[-len(values) :], values, strict=True):
            row[name.replace("__", "/")] = value
    return rows


def rollout(prompt: str, response: str, reward: float, tokens: int = 4, ended: str = "stop") -> dict[str, Any]:
    facts = {"sample": prompt, "prompt": prompt, "response": response, "rewards": {"right": reward}, "advantage": 0.0}
    return facts | {"tokens": tokens, "finish_reason": ended}


def sampled(folder: Path, steps: dict[int, list[dict[str, Any]]]) -> Path:
    write_run(folder, healthy())
    for path in (folder / "samples").glob("step_*.jsonl"):
        path.unlink()
    for step, rows in steps.items():
        (folder / "samples" / f"step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
