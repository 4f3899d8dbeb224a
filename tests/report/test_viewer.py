"""The page in a real browser: 10,000 sampled rollouts searched, sorted, coloured; charts pointed at and zoomed."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image

from megatron_rl.base.messages import ConfigError
from megatron_rl.report import read_run, render
from megatron_rl.report.run_record import RolloutRow

from .run_folders import healthy, write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
STEPS, EACH = 20, 500


def test_samples_of_a_stranger(tmp_path: Path) -> None:
    """Numbers that JSON has not, files that are no step's, links to other files: none is shown, none stops the page."""
    folder = write_run(tmp_path / "run", healthy())
    samples = folder / "samples"
    (samples / "images").mkdir(exist_ok=True)
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    (samples / "images" / "x.webp").symlink_to(secret)
    odd = {"prompt": "p", "response": "r", "advantage": float("nan"), "deep": [float("inf")], "images": ["x.webp"]}
    (samples / "step_1.jsonl").write_text(json.dumps(row(1, 0) | odd) + "\n")
    (samples / "step_x.jsonl").write_text("{}\n")
    text = render([read_run(folder)])
    data = re.search(r'<script[^>]*id="rollouts"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert data is not None
    read = json.loads(data[1].replace("<\\/", "</"), parse_constant=lambda name: pytest.fail(name))
    assert any(one["advantage"] is None and one["deep"] == [None] for one in read["rows"])
    assert read["images"] == {}
    for bad in ({"prompt": "p"}, {"prompt": [1], "response": "r"}, [1]):
        (samples / "step_1.jsonl").write_text(json.dumps(bad) + "\n")
        with pytest.raises(ConfigError, match=r"step_1\.jsonl has rows that are no rollouts"):
            read_run(folder)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 10,000 sampled rollouts; the tokens of the last step's first group are recorded."""
    folder = write_run(
        tmp_path_factory.mktemp("viewer") / "run",
        healthy(STEPS, response_length__mean=[1e4 * step for step in range(1, STEPS + 1)]),
    )
    for step in range(1, STEPS + 1):
        rows = [row(step, number) for number in range(EACH)]
        (folder / "samples" / f"step_{step}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "samples" / "images").mkdir()
    (folder / "sft").mkdir()
    warmed = [{"step": step, "time": 1.0, "sft/loss": 3e4 / step} for step in range(10_000, 30_001, 10_000)]
    (folder / "sft" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in warmed))
    Image.new("RGB", (8, 8), "red").save(folder / "samples" / "images" / "red.webp")
    tokens = folder / "rollouts" / f"step_{STEPS}.tokens"
    tokens.mkdir(parents=True)
    np.savez(folder / "rollouts" / f"step_{STEPS}.npz", samples=np.array(["p/1", "p/0"]), rewards=np.zeros((2, 5, 1)))
    drawn = np.array([-1.0, -2.0, -3.0], dtype=np.float32)
    np.savez(
        tokens / "0.npz",
        rows=np.array([7, 8]),  # the third and the fourth of the second prompt
        lengths=np.array([3, 3]),
        log_probs=np.tile(drawn + np.float32(0.5), 2),
        old_log_probs=np.tile(drawn + np.array([0.0, 0.25, -0.25], dtype=np.float32), 2),
        rollout_log_probs=np.tile(drawn, 2),
        gradient_weights=np.tile(np.array([0.0, 2e-6, -8e-6], dtype=np.float32), 2),
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
    if (step, number) == (STEPS, 3):
        call = {"function": {"name": "find", "arguments": "<who>"}}
        made["conversation"] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "in the attic"},
            {"role": "assistant", "content": "é"},
        ]
        made["turn_tokens"] = [1, 2]
        made["failed_by"] = "model"
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


def outcome(page: Path, script: str, **state: str) -> Any:
    """What `script`, the body of a function, returns on the page. `state`: of the viewer, in the address."""
    if not starts(page.parent / "profile"):
        pytest.skip("chromium does not start on this machine")
    returned = (
        f"<pre id=outcome></pre><script>outcome.textContent = JSON.stringify((() => {{{script}}})());</script></body>"
    )
    seen = page.with_name("seen.html")
    seen.write_text(page.read_text("utf-8").replace("</body>", returned), encoding="utf-8")
    address = f"{seen.as_uri()}#{urlencode(state)}"
    run = subprocess.run(
        [*command(page.parent / "profile"), address], capture_output=True, text=True, timeout=300, check=True
    )
    [found] = re.findall(r'<pre id="outcome">(.+?)</pre>', run.stdout)
    return json.loads(html.unescape(found))


@needs_browser
def test_ten_thousand_rollouts_are_searched_and_have_elements_for_those_in_sight(page: Path) -> None:
    script = """
    const responses = () => [...viewer.querySelectorAll("button.line span:last-child")].map(one => one.textContent);
    const now = () => ({count: viewer.querySelector(".count").textContent, responses: responses(), open: detail.textContent});
    const found = [now()];
    const states = [{step: "7", ended: "length", sign: "advantage > 0", sort: "advantage, highest"}, {sort: "order"}];
    for (const state of states) {
      for (const name of CONTROLS) pick(name).value = state[name] || "";
      select();
      found.push(now());
    }
    list.scrollTop = 26 * 7000;
    draw();
    found.push(now());
    const press = key => list.dispatchEvent(new KeyboardEvent("keydown", {key}));
    chosen = shown[4999];
    press("ArrowDown"); press("ArrowDown"); press("ArrowUp");
    return [...found, [chosen.response, viewer.querySelector(".line.chosen").textContent]];"""
    address, filtered, everything, far, arrows = outcome(page, script, search="17? ANSWER-3", sort="advantage, highest")
    assert address["count"] == "5 of 10,000"
    assert address["responses"] == [f"answer-3-{number}" for number in (89, 88, 87, 86, 85)]
    assert "what is 17? </script>" in address["open"]  # the first one is open
    assert filtered["count"] == "24 of 10,000"
    assert filtered["responses"][0] == "answer-7-490"
    assert everything["count"] == "10,000 of 10,000"
    assert everything["responses"][0] == "answer-1-0"
    assert "answer-15-0" in far["responses"]  # the 7,001st
    assert arrows[0] == "answer-11-0"  # the one after the 5,000th, and scrolled to
    assert "answer-11-0" in arrows[1]
    assert all(10 < len(state["responses"]) < 60 for state in (everything, far))


@needs_browser
def test_an_open_rollout_has_its_tokens_coloured_its_images_turns_and_remarks(page: Path) -> None:
    script = """
    const show = (response, colour) => {
      chosen = data.rows.find(row => row.response === response);
      pick("colour").value = colour;
      open();
      const tokens = [...detail.querySelectorAll("span")];
      return tokens.map(one => [one.textContent, one.title.split(": ")[1], one.style.background]);
    };
    const coloured = ["difference", "ratio", "weight"].map(colour => show("answer-20-2", colour));
    show("answer-1-1", "ratio");
    const plain = detail.textContent;
    show("answer-1-0", "");
    const texts = query => [...detail.querySelectorAll(query)].map(one => [one.className, one.textContent]);
    return {coloured, plain, images: [...detail.querySelectorAll("img")].map(one => one.src), all: detail.textContent,
      turns: texts(".role, .role + pre"), remarks: texts("li")};"""
    found = outcome(page, script)
    red, green = (
        (lambda strength: f"rgba(220, 38, 38, {strength})"),
        (lambda strength: f"rgba(5, 150, 105, {strength})"),
    )
    difference, ratio, weight = found["coloured"]
    assert difference == [["<b>", "0", red(0)], ["2", "0.25", green(0.8)], ["é", "-0.25", red(0.8)]]
    assert [float(value) for _, value, _ in ratio] == pytest.approx(np.exp([0.5, 0.25, 0.75]), abs=1e-5)
    assert [value for _, *value in weight] == [["0", red(0)], ["0.000002", green(0.4)], ["-0.000008", red(0.8)]]
    assert "were not recorded" in found["plain"]
    [image] = found["images"]
    assert image.startswith("data:image/webp;base64,")
    assert "samples/images/lost.webp" in found["all"]
    assert found["turns"] == [["role", "system"], ["", "be <brief>"], ["role", "user"], ["", "what is it?"]]
    assert found["remarks"] == [["good", "✓ walk"], ["bad", "✗   steps: 3, wanted 4"], ["", "not <b>quite</b>"]]


@needs_browser
def test_an_open_conversation_is_shown_by_turn_with_the_tokens_of_each(page: Path) -> None:
    script = """
    chosen = data.rows.find(row => row.conversation);
    const shown = () => [...detail.querySelectorAll(".role + pre")].map(one => one.textContent);
    const spans = () => [...detail.querySelectorAll("span")].map(one => [one.textContent, one.title.split(": ")[1]]);
    pick("colour").value = "";
    open();
    const plain = shown();
    pick("colour").value = "difference";
    open();
    const coloured = shown(), tokens = spans();
    pick("colour").value = "";
    pick("search").value = "attic";
    select();
    return {plain, coloured, tokens, facts: detail.querySelector(".sub").textContent,
      count: viewer.querySelector(".count").textContent,
      roles: [...detail.querySelectorAll(".role")].map(one => one.textContent), line: list.textContent};"""
    seen = outcome(page, script)
    assert "2 turns · broken off by the model" in seen["facts"]
    call, reply, answer = seen["plain"]
    assert "<who>" in call
    assert (reply, answer) == ("in the attic", "é")
    assert seen["coloured"] == ["<b>", "in the attic", "2é"]
    assert seen["tokens"] == [["<b>", "0"], ["2", "0.25"], ["é", "-0.25"]]
    assert seen["roles"] == ["assistant", "tool", "assistant"]
    assert seen["count"].startswith("1 of")
    assert "in the attic" in seen["line"]


@needs_browser
def test_charts_show_a_step_s_values_and_a_dragged_range_until_a_double_click(page: Path) -> None:
    script = """
    const boxes = [...document.querySelectorAll(".chart")], named = text => boxes.find(one => one.textContent.includes(text));
    const box = named("Reward, weighted sum"), plot = () => box.querySelector(":scope > svg").getBoundingClientRect();
    const point = (kind, step) => box.querySelector(":scope > svg").dispatchEvent(new PointerEvent(kind, {
      bubbles: true, button: 0, clientX: plot().left + 46 + step / 20 * (plot().width - 60), clientY: plot().top + 40 }));
    box.setPointerCapture = () => {};  // there is no pointer
    const texts = (one, query) => [...one.querySelectorAll(query)].map(found => found.textContent);
    const now = () => boxes.map(one => ({title: texts(one, ".title span"), values: texts(one, "b"),
      steps: texts(one, "text[text-anchor=middle]").map(Number), scale: texts(one, "text[text-anchor=end]").map(Number)}));
    point("pointermove", 7);
    const hovered = now();
    point("pointerdown", 5); point("pointermove", 8); point("pointerup", 10);
    const zoomed = now();
    box.dispatchEvent(new MouseEvent("dblclick", {bubbles: true}));
    return [hovered, zoomed, now()];"""
    hovered, zoomed, whole = ({chart["title"][0]: chart for chart in state} for state in outcome(page, script))
    assert hovered.pop("Loss, nats per token")["title"][1] == "sft/loss", "steps of the warm-up are others"
    evaluation = hovered["Evaluation"]["title"][1]
    assert evaluation == "step 0", "the step of the value that is shown"
    assert {chart["title"][1] for name, chart in hovered.items() if name != "Evaluation"} == {"step 7"}
    assert hovered["Reward, weighted sum"]["values"] == ["0.35"]
    assert hovered["Evaluation"]["values"] == ["0.25"]  # of step 0, the last before
    assert hovered["Seconds per step, by phase"]["values"] == ["1.25", "0.5", "0.25"]
    for state in (zoomed, whole):
        assert state.pop("Loss, nats per token")["steps"][-1] == 30_000
    assert {(chart["steps"][0], chart["steps"][-1]) for chart in zoomed.values()} == {(5, 10)}
    assert {(chart["steps"][0], chart["steps"][-1]) for chart in whole.values()} == {(0, 20)}
    assert (whole["Reward, weighted sum"]["scale"][0], whole["Reward, weighted sum"]["scale"][-1]) == (0, 1)
    assert (zoomed["Reward, weighted sum"]["scale"][0], zoomed["Reward, weighted sum"]["scale"][-1]) == (0.3, 0.5)
    assert whole["Cut at the token limit"]["scale"][-1] == 0.1  # a share of zero is not drawn to full height


@needs_browser
def test_a_click_opens_a_rollout_in_the_right_pane_and_an_axis_has_short_numbers(page: Path) -> None:
    script = """
    viewer.querySelectorAll("button.line")[3].click();
    const texts = () => [...detail.children].map(one => one.textContent);
    const opened = texts();
    chosen.tokens = 1;
    open();
    const chart = [...document.querySelectorAll(".chart")].find(one => one.textContent.includes("Response length, tokens"));
    const axis = [...chart.querySelectorAll("text[text-anchor=end]")].map(one => one.textContent);
    return [opened, texts()[0], axis];"""
    opened, of_one, axis = outcome(page, script)
    facts = "step 1 · p/0 #3 · advantage -0.494 · 3 tokens · stop · right 1"
    assert opened == [facts, "Prompt", "what is 0? </script>", "Response", "answer-1-3", "Answer", "42"]
    assert of_one == facts.replace("3 tokens", "1 token")
    assert axis == ["0", "50k", "100k", "150k", "200k"]


def test_what_a_page_holds_has_a_limit(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.report.run_record._ROLLOUTS", 16 * EACH)
    read = read_run(page.parent).samples
    assert len(read) == 16
    assert {1, STEPS} <= read.keys()
