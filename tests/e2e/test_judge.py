"""A judge over HTTP in a real run: asked while others generate, counted once, and not asked again by a resumed run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rewards.chat_server import serving

from .job import Job, rows


def grade(number: int, body: dict[str, Any]) -> str:
    """By the candidate's length alone, so that the order of requests plays no part; some never get an answer."""
    candidate = body["messages"][-1]["content"].rpartition("\n</candidate_")[0].rpartition(">\n")[2]
    return "text:hm" if len(candidate) % 7 == 6 else f"score:{(0.0, 0.25, 0.5, 0.75, 0.9, 1.0)[len(candidate) % 6]}"


def details(run_dir: Path) -> list[dict[str, Any]]:
    """What the ranks noted about their rounds of scoring."""
    lines = [line for path in (run_dir / "answers" / "judge").glob("*.jsonl") for line in path.read_text().splitlines()]
    return [row for row in map(json.loads, lines) if "requests" in row]


def test_a_run_with_a_judge_and_its_resume_without_one(tmp_path: Path) -> None:
    options = ("algorithm.preset=awpo", "sft.steps=10", "trainer.steps=3", "trainer.eval_every=0", "checkpoint.every=1")
    options += ("rewards.judge.reward=judge", "rewards.judge.params.model=m")
    with serving(grade) as server:
        job = Job(tmp_path / "a", *options, f"rewards.judge.params.urls={server.url}")
        assert job.finish() == 0, job.stderr
        asked = len(server.requests)
    rounds = details(job.run_dir)
    assert sum(one["requests"] for one in rounds) == asked, "evaluations included"
    assert all(one["requests"] == one["replies"] == one["scored"] - one["cache_hits"] for one in rounds)
    assert {reason for one in rounds for reason in one["no_score"]} == {"nonsense"}
    for name in ("scored", "cache_hits", "tokens"):
        assert sum(row[f"judge/{name}"] for row in rows(job.run_dir)) == sum(one[name] for one in rounds)
    steps = {row["step"]: row for row in rows(job.run_dir) if row["step"]}
    for row in steps.values():
        assert row["judge/scored"] >= 32
        assert row["judge/retries"] == 0
        own = [one for one in rounds if one["step"] == row["step"]]
        assert 0 < row["judge/latency_p95"] <= max(one["latency_max"] for one in own)
        unscored = [one["no_score"].get("nonsense", 0) for one in rounds if one["step"] == row["step"]]
        assert row["judge/no_score"] == sum(unscored)
        assert 0 < row["reward_overlap/share"] <= 1
    assert sum(row["judge/no_score"] for row in steps.values()) > 0
    assert job.stdout.count("rollouts have no score from the server: the reply holds no score: 'hm'") == 1
    sampled = [json.loads(line) for line in (job.run_dir / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert {record["rewards"]["judge"] for record in sampled} <= {None, 0.0, 0.25, 0.5, 0.75, 0.9, 1.0}
    for record in sampled:  # whichever rank asked
        [[words, right]] = record["remarks"]["judge"]
        assert (words == "hm", right) == (record["rewards"]["judge"] is None, None)

    # The same run as it was after step 1, and a judge that is broken: what was graded needs none.
    again = tmp_path / "b" / "run"
    shutil.copytree(job.run_dir, again)
    for later in ("step_2", "step_3"):
        shutil.rmtree(again / "checkpoints" / later)
    with serving("status:500") as broken:
        resumed = Job(tmp_path / "b", *options, f"rewards.judge.params.urls={broken.url}")
        assert resumed.finish() == 0, resumed.stderr
        assert not broken.requests
    for row in rows(resumed.run_dir):
        if row["step"] < 2:
            continue
        assert row["judge/scored"] == row["judge/cache_hits"]
        first = steps[row["step"]]
        for name in ("mean", "judge"):
            assert row[f"reward/{name}"] == first[f"reward/{name}"], name
        for name in ("judge/no_score", "advantage/std", "actor/grad_norm", "awpo/w_mix"):
            assert row[name] == first[name], name
