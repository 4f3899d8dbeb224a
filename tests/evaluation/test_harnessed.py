"""What `evaluate --harness` does while the harness runs; the real packages are in tests/e2e/test_harnesses.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.schema import EvaluationConfig, HarnessConfig
from megatron_rl.evaluation import harnessed
from megatron_rl.evaluation.harnesses import HARNESSES, Job
from megatron_rl.rollout.endpoint_engine import Server

from .server import serving


@pytest.mark.parametrize("alive", [True, False])
def test_a_server_elsewhere_that_no_longer_answers_ends_the_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """evalplus asks a server that is gone for ever; a program that waits stands in for it."""
    (tmp_path / "waits").symlink_to("/bin/sleep")
    waits = replace(HARNESSES["evalplus"], commands=lambda job: [["waits", "2" if alive else "60"]])
    monkeypatch.setitem(HARNESSES, "evalplus", waits)
    monkeypatch.setattr(harnessed, "programs", lambda name: tmp_path)
    monkeypatch.setattr(harnessed, "_ASK", 0.1)
    monkeypatch.setattr(harnessed, "_GONE", 0.5)
    config: Any = SimpleNamespace(evaluation=EvaluationConfig(harness=HarnessConfig(name="evalplus")))
    log: Any = SimpleNamespace(phase=lambda phase: None, note=lambda note: None)
    with serving(lambda request, attempt: (500, {})) as server:
        job = Job(config, Server((server.url,), "tiny"), tmp_path)
        if alive:
            harnessed._run(log, job, None)
    if not alive:
        with pytest.raises(OSError, match=r"no answer for [0-9]+ s: http://127.0.0.1:[0-9]+/v1/models"):
            harnessed._run(log, job, None)


def test_a_set_whose_questions_have_no_grades_is_refused_by_its_key(tmp_path: Path) -> None:
    """As lm_eval's perplexities: a question has a log-likelihood and a number of words."""
    (tmp_path / "results_now.json").write_text("{}")
    row = {"metrics": ["word_perplexity"], "filter": "none", "word_perplexity": [-9.5, 3]}
    (tmp_path / "samples_wikitext_now.jsonl").write_text(json.dumps(row) + "\n")
    harness = HarnessConfig(name="lm_eval", sets=["wikitext"])
    config: Any = SimpleNamespace(evaluation=EvaluationConfig(harness=harness))
    with pytest.raises(
        ValueError, match=r"evaluation.harness.sets: one has word_perplexity=\[-9.5, 3\] for a question"
    ):
        list(HARNESSES["lm_eval"].read(Job(config, Server((), "tiny"), tmp_path)))


def test_a_harness_inherits_nothing_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tells").symlink_to("/usr/bin/env")
    monkeypatch.setitem(HARNESSES, "evalplus", replace(HARNESSES["evalplus"], commands=lambda job: [["tells", "--"]]))
    monkeypatch.setattr(harnessed, "programs", lambda name: tmp_path)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("OF_A_USER", "1")
    config: Any = SimpleNamespace(evaluation=EvaluationConfig(harness=HarnessConfig(name="evalplus")))
    log: Any = SimpleNamespace(phase=lambda phase: None, note=lambda note: None)
    server: Any = SimpleNamespace(poll=lambda: None)
    harnessed._run(log, Job(config, Server((), "tiny"), tmp_path), server)
    told = (tmp_path / "evalplus.log").read_text()
    assert "OF_A_USER=1" in told
    assert "PYTHON" not in told
