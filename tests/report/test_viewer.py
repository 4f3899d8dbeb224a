"""The page in a real browser: 10,000 sampled rollouts searched, sorted, coloured; charts pointed at and zoomed."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image

from megatron_rl.report import read_run, render
from megatron_rl.report.run import RolloutRow

from .test_report_page import healthy, write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
STEPS, EACH = 20, 500


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 10,000 sampled rollouts; the tokens of the last step's first group are recorded."""
    folder = write_run(tmp_path_factory.mktemp("viewer") / "run", healthy(STEPS))
    for step in range(1, STEPS + 1):
        rows = [row(step, number) for number in range(EACH)]
        (folder / "samples" / f"step_{step}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "samples" / "images").mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / "samples" / "images" / "red.webp")
    tokens = folder / "rollouts" / f"step_{STEPS}.tokens"
    tokens.mkdir(parents=True)
    np.savez(folder / "rollouts" / f"step_{STEPS}.npz", samples=np.array(["p/1", "p/0"]), rewards=np.zeros((2, 5, 1)))
    drawn = np.array([-1.0, -2.0, -3.0], dtype=np.float32)
    np.savez(
        tokens / "0.npz",
        rows=np.array([7]),  # the third of the second prompt
        lengths=np.array([3]),
        log_probs=drawn + np.float32(0.5),
        old_log_probs=drawn + np.array([0.0, 0.25, -0.25], dtype=np.float32),
        rollout_log_probs=drawn,
        gradient_weights=np.array([0.0, 2e-6, -8e-6], dtype=np.float32),
    )
    file = folder / "report.html"
    file.write_text(render([read_run(folder)]), encoding="utf-8")
    return file


def row(step: int, number: int) -> RolloutRow:
    made = plain_row(step, number)
    if (step, number) == (1, 0):
        made["prompt"] = [{"role": "system", "content": "be <brief>"}, {"role": "user", "content": "what is it?"}]
        made["images"] = ["red.webp", "lost.webp"]
        made["remarks"] = {
            "tools": [("walk", True), ("  steps: 3, wanted 4", False)],
            "judge": [("not <b>quite</b>", None)],
        }
    return made


def plain_row(step: int, number: int) -> RolloutRow:
    return {
        "sample": f"p/{number // 5}",
        "rollout": number % 5,
        "prompt": f"what is {number // 5}? </script>",
        "response": f"answer-{step}-{number}",
        "answer": "42",
        "rewards": {"right": float(number % 2)},
        "advantage": number / EACH - 0.5,
        "finish_reason": "length" if number % 10 == 0 else "stop",
        "tokens": 3,
        "pieces": ["<b>", "2", "\u00e9"],
    }


def command(profile: Path) -> list[str]:
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=3000"]
    return [BROWSER, *flags, f"--user-data-dir={profile}", "--dump-dom"]


@functools.cache
def starts(profile: Path) -> bool:
    """Whether it shows an empty page: some containers let no browser run."""
    try:
        done = subprocess.run([*command(profile), "about:blank"], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and "<body>" in done.stdout


def seen(page: Path, script: str = "", **state: str) -> str:
    """The page's elements after its scripts, and `script`, have run."""
    if not starts(page.parent / "profile"):
        pytest.skip("chromium does not start on this machine")
    page = page.with_name("seen.html") if script else page
    if script:
        whole = (page.parent / "report.html").read_text("utf-8")
        page.write_text(whole.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    done = subprocess.run(
        [*command(page.parent / "profile"), f"{page.as_uri()}#{urlencode(state)}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


def listed(page: Path, script: str = "", **state: str) -> str:
    """The viewer's elements."""
    return seen(page, script, **state).partition('<div id="viewer"')[2].partition("<script")[0]


def lines(text: str) -> list[str]:
    """The responses in the list."""
    return re.findall(r'<button class="line[^>]*>.*?<span>([^<]*)</span></button>', text)


@needs_browser
def test_ten_thousand_rollouts_have_elements_for_those_in_sight(page: Path) -> None:
    text = listed(page)
    assert "10,000 of 10,000" in text
    assert 10 < len(lines(text)) < 60
    assert lines(text)[0] == "answer-1-0"
    far = listed(page, "list.scrollTop = 26 * 7000; draw();")
    assert 10 < len(lines(far)) < 60
    assert "answer-15-0" in lines(far)  # the 7,001st


@needs_browser
def test_search_filter_and_order_come_from_the_address(page: Path) -> None:
    text = listed(page, search="17? ANSWER-3", sort="advantage, highest")
    assert "5 of 10,000" in text
    assert lines(text) == [f"answer-3-{number}" for number in (89, 88, 87, 86, 85)]
    text = listed(page, step="7", ended="length", sign="advantage > 0", sort="advantage, highest")
    assert "24 of 10,000" in text
    assert lines(text)[0] == "answer-7-490"
    assert "what is 98? &lt;/script&gt;" in text  # the first one is open


@needs_browser
def test_recorded_tokens_are_coloured(page: Path) -> None:
    state = {"search": f"answer-{STEPS}-2", "step": str(STEPS)}
    open_ = f"chosen = shown.find(row => row.response === 'answer-{STEPS}-2'); open();"
    text = listed(page, open_, colour="difference", **state)
    grounds = re.findall(r'title="([^"]*)" style="background: rgba\((\d+), \d+, \d+, ([\d.]+)\)', text)
    assert [(red, strength) for _, red, strength in grounds] == [("220", "0"), ("5", "0.8"), ("220", "0.8")]
    assert [title.rpartition(": ")[2] for title, *_ in grounds] == ["0", "0.25", "-0.25"]
    assert "&lt;b&gt;" in text
    text = listed(page, open_, colour="ratio", **state)
    assert [float(value) for value in re.findall(r': ([\d.]+)" style', text)] == pytest.approx(
        np.exp([0.5, 0.25, 0.75]), abs=1e-5
    )
    text = listed(page, open_, colour="weight", **state)
    grounds = re.findall(r'title="[^"]*: ([^"]*)" style="background: rgba\((\d+), \d+, \d+, ([\d.]+)\)', text)
    assert grounds == [("0", "220", "0"), ("0.000002", "5", "0.4"), ("-0.000008", "220", "0.8")]
    assert "were not recorded" in listed(page, colour="ratio", step="1")


def test_what_a_page_holds_has_a_limit(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.report.run._ROLLOUTS", 16 * EACH)
    read = read_run(page.parent).samples
    assert len(read) == 16
    assert {1, STEPS} <= read.keys()


@needs_browser
def test_images_turns_and_what_rewards_say_are_shown(page: Path) -> None:
    text = listed(page, search="wanted 4")
    assert "1 of 10,000" in text
    assert re.search(r'<img src="data:image/webp;base64,[\w+/=]+">', text)
    assert "samples/images/lost.webp" in text
    assert re.findall(r'<div class="role">(\w+)</div><pre>([^<]*)</pre>', text) == [
        ("system", "be &lt;brief&gt;"),
        ("user", "what is it?"),
    ]
    assert re.findall(r'<li( class="\w+")?>([^<]*)</li>', text) == [
        (' class="good"', "✓ walk"),
        (' class="bad"', "✗   steps: 3, wanted 4"),
        ("", "not &lt;b&gt;quite&lt;/b&gt;"),
    ]


POINTER = """
const box = [...document.querySelectorAll(".chart")].find(one => one.textContent.includes("Reward, weighted sum"));
const plot = () => box.querySelector(":scope > svg").getBoundingClientRect();
const point = (kind, step) => box.querySelector(":scope > svg").dispatchEvent(new PointerEvent(kind, {
  bubbles: true, button: 0, clientX: plot().left + 46 + step / 20 * (plot().width - 54), clientY: plot().top + 40 }));
box.setPointerCapture = () => {};  // there is no pointer
"""


def charts(page: Path, script: str) -> dict[str, str]:
    """The elements of each chart by its title, after `script`."""
    found = re.findall(
        r'<div class="chart(?: wide)?">(.*?)</div>(?=<div class="chart|</div><script)', seen(page, POINTER + script)
    )
    return {re.findall(r'<span class="">([^<]*)</span>', one)[0]: one for one in found}


@needs_browser
def test_a_step_under_the_mouse_shows_its_values_in_all_charts(page: Path) -> None:
    found = charts(page, "point('pointermove', 7);")
    assert {"step 7"} == {re.findall(r'class="sub">([^<]*)<', one)[0] for one in found.values()}
    assert re.findall(r"<b class=\"\">([^<]*)</b>", found["Reward, weighted sum"]) == ["0.35"]
    assert re.findall(r"<b class=\"\">([^<]*)</b>", found["Evaluation"]) == ["0.25"]  # of step 0, the last before
    assert re.findall(r"<b class=\"\">([^<]*)</b>", found["Seconds per step, by phase"]) == ["1.25", "0.5", "0.25"]


@needs_browser
def test_a_dragged_range_is_shown_in_all_charts_until_a_double_click(page: Path) -> None:
    def axis(chart: str) -> list[str]:
        return re.findall(r'text-anchor="middle">(\d+)<', chart)

    drag = "point('pointerdown', 5); point('pointermove', 8); point('pointerup', 10);"
    found = charts(page, drag)
    assert {("5", "10")} == {(axis(one)[0], axis(one)[-1]) for one in found.values()}
    ticks = [float(value) for value in re.findall(r'text-anchor="end">([\d.]+)<', found["Reward, weighted sum"])]
    assert 0.2 < ticks[0] < ticks[-1] < 0.55  # the values of steps 5 to 10 are .25 to .5
    found = charts(page, drag + "box.dispatchEvent(new MouseEvent('dblclick', {bubbles: true}));")
    assert {("0", "20")} == {(axis(one)[0], axis(one)[-1]) for one in found.values()}
    shares = found["Cut at the token limit"]
    assert (
        re.findall(r'text-anchor="end">([\d.]+)<', shares)[-1] == "0.1"
    )  # a share of zero is not drawn to full height
