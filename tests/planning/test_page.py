"""`megatron-rl plan --html`."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main

ROOT = Path(__file__).parents[2]
PLAN = ("plan", str(ROOT / "recipes" / "scale" / "qwen3-32b.yaml"), "--nodes", "4")


class Page(HTMLParser):
    """What is drawn and said; fails on tags that do not nest and on anything from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.text = ""
        self.charts: list[list[dict[str, Any]]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert not {"src", "href"} & set(given)
        self.titles.append(given.get("title", ""))
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["script"]:
            self.text += data
        elif data.startswith("["):
            self.charts.append(json.loads(data))


def test_memory_and_time_without_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    assert main([*PLAN, "--html", str(file), "--hardware", "h100,memory_gib=40"]) == 1
    page = Page(file.read_text("utf-8"))
    table = capsys.readouterr().out
    for said in re.findall(r"^  (phase .*)$", table, re.MULTILINE):  # why it does not fit
        assert said in page.text
    assert "It fits." not in page.text
    [weights] = re.findall(r"^engine: weights +(.*)$", table, re.MULTILINE)
    phases = weights.split()  # that need them
    assert page.titles.count(f"engine: weights: {phases[0]} GiB") == len(phases)
    assert "Simulated" not in page.text


def test_steps_and_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    more = ["--simulate", "--simulated-steps", "2", "--mtbf-hours", "100", "--judge-seconds", "5"]
    assert main([*PLAN, "--html", str(file), *more]) == 0
    page = Page(file.read_text("utf-8"))
    for words in ("It fits.", "synchronous", "split, launch.generators", "not in this product", "Young", "Daly"):
        assert words in page.text
    assert page.text.count("not in this product") == 1, "passes under the tail"
    [decoded], [goodput] = page.charts
    for line in decoded["lines"]:  # none at the end of the second step's generation, all at the first one's start
        assert 0 < max(line["y"]) <= 4 * 8 * 512
        assert line["y"][-1] == 0
        assert line["x"] == sorted(line["x"])
    assert [len(drawing["lines"]) for drawing in (decoded, goodput)] == [4, 1]
    assert main([*PLAN, "--html", str(tmp_path / "no" / "folder.html")]) == 1
