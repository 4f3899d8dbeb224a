"""`megatron-rl plan --simulate`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.cli import main

ROOT = Path(__file__).parents[2]
PLAN = (
    "plan",
    str(ROOT / "recipes" / "scale" / "qwen3-32b.yaml"),
    "--nodes",
    "4",
    "--simulate",
    "--simulated-steps",
    "2",
)


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json", "--mtbf-hours", "50", "--judge-seconds", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    simulated, predicted = found["simulation"], found["step_time"]["seconds"]
    phases = {name: phase["seconds"] for name, phase in simulated["synchronous"]["phases"].items()}
    # Training is the predicted one's for the tokens that were drawn; generation is its own calculation, of two steps here.
    assert phases["update"] == pytest.approx(predicted["update"], rel=0.03)
    assert phases["sync"] == pytest.approx(predicted["sync"])
    assert phases["generate"] == pytest.approx(predicted["generate"], rel=0.15)
    assert phases["reward"] > 1
    assert sum(phases.values()) == pytest.approx(simulated["synchronous"]["seconds"])
    assert simulated["partial"]["seconds"] < simulated["synchronous"]["seconds"]
    goodput = simulated["goodput"]
    assert goodput["recipe"]["steps"] == 10
    assert goodput["recipe"]["goodput"] <= goodput["best"]["goodput"] < 1


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.savez(tmp_path / "step_1.npz", lengths=np.full((4, 16), 700.0))
    assert main([*PLAN, "--response-lengths", str(tmp_path / "step_1.npz"), "rollout.max_tokens=512"]) == 0
    text = capsys.readouterr().out
    assert "responses of 512 in the mean, the longest about 512" in text
    assert "recorded, of 4 prompts" in text
    assert "split, launch.generators=" in text
    assert text.count("not in this product") == 1
    assert "synchronous, as a run is" in text
    assert main([*PLAN, "trainer.like_lengths=4", "algorithm.resample_rounds=0"]) == 0
    assert "synchronous, as a run is" not in capsys.readouterr().out
    assert "goodput" not in text  # nothing is known of failures


def test_groups_that_are_replaced_and_drafts_are_spoken_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "rollout.speculation.tokens=4"]) == 0
    text = capsys.readouterr().out
    assert "as if every group had a signal" in text
    assert "as if no token drawn 64 sequences at a time or fewer had been guessed (rollout.speculation, " in text
    assert main([*PLAN, "rollout.speculation={tokens: 4, below: 9}", "--drafted-share", "0.6"]) == 0
    assert "as if 60% of the tokens drawn 9 sequences at a time or fewer had been guessed" in capsys.readouterr().out
    seconds = []
    for ahead in ("true", "false"):
        assert main([*PLAN, "--signal-share", "0.6", f"algorithm.resample_ahead={ahead}"]) == 0
        [line] = [one for one in capsys.readouterr().out.splitlines() if one.startswith("synchronous, resampled")]
        assert ("ahead" in line) == (ahead == "true")
        seconds.append(float(line.split()[-4]))
    assert seconds[0] < seconds[1]
    assert "partial" not in text.partition("synchronous, resampled")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mtbf-hours", "0"], "--mtbf-hours: must be above 0"),
        (["--judge-seconds", "-1"], "--judge-seconds: must not be below 0"),
        (["--simulated-steps", "0"], "--simulated-steps: must be above 0"),
        (["--mtbf-hours", "nan"], "--mtbf-hours: 'nan' is no number"),
        (["--mtbf-hours", "1e300"], "--mtbf-hours: must not be above 9,223,372,036,854,775,807"),
        (["--simulated-steps", "²"], "--simulated-steps: must be above 0"),
        (["--response-tokens", "900,0.6,1"], "--response-tokens: '900,0.6,1' is no number"),
    ],
)
def test_values_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*PLAN, *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulated-steps", "2"], "--simulated-steps has no effect here: it needs --simulate"),
        (["--drawn-before"], "--drawn-before has no effect here: it needs --simulate"),
        (["--judge-seconds", "4"], "--judge-seconds has no effect here: it needs --simulate"),
        (["--signal-share", "1.5"], "--signal-share: a share is at most 1, not 1.5"),
        (
            ["--signal-share", "0.5", "algorithm.resample_rounds=0"],
            "--signal-share has no effect here: it needs algorithm.resample_rounds",
        ),
        (["--mtbf-hours", "4"], "--mtbf-hours has no effect here: it needs --simulate"),
        (["--drafted-share", "0.1"], "--drafted-share has no effect here: it needs rollout.speculation"),
        (
            ["--drafted-share", "0.81", "rollout.speculation.tokens=4"],
            "--drafted-share: drafts of 4 tokens guess at most 0.8 of all, not 0.81",
        ),
        (["--fp8"], "--fp8 has no effect here: it needs --search"),
        (["--headroom-gib", "0"], "--headroom-gib has no effect here: it needs --search"),
        (["--write", "x.yaml"], "--write has no effect here: it needs --search"),
        (["--response-tokens", "9", "--response-lengths", "x"], "--response-tokens has no effect here"),
        (["--simulate", "--judge-seconds", "4,0.4"], "--judge-seconds: 0.4 answers under way are too few"),
        (["--prompt-tokens", "1e9"], "prompts of 1e+09 tokens in the mean: rollout.max_prompt_tokens is"),
        (["--simulate", "--response-tokens", "1000,40"], "in the mean, spread 40: at most"),
        (["--hardware", "h100,processors=0.5"], "`processors` must be a whole number, not 0.5"),
        (["model.path=~nobody-of-this-name/x"], "`model.path`: ~nobody-of-this-name/x does not exist"),
    ],
)
def test_options_without_effect(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN[:4], *arguments]) == 2
    assert message in capsys.readouterr().err


def test_any_number_of_answers_may_be_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--judge-seconds", "4,1e18", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulation"]["synchronous"]["phases"]["reward"]["seconds"] > 0


def test_lengths_that_are_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--response-lengths", "/nowhere"]) == 2
    assert "/nowhere has no recorded rollouts" in capsys.readouterr().err


def test_the_table_says_what_lowers_preemption_and_leaves_what_is_no_rate_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PLAN]) == 0
    text = capsys.readouterr().out
    assert "sets a sequence back to be read again later: fewer at once (rollout.max_concurrent) need less cache" in text
    [sync] = [line for line in text.splitlines() if line.startswith("sync ")][:1]
    assert not re.search(r"%\s+[\d,]+\s+the", sync), "a sync moves weights, no tokens"
    assert not re.search(r"  products\b", text), "but matrix products"
