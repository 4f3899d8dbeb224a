"""The judge against a server that misbehaves on purpose: every rollout ends up answered, or counted as not."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rewards import make_reward
from megatron_rl.runtime.http import EndpointError

from .chat_server import serving
from .judging import SAMPLE, adds_up, make, scores


# ----------------------------------------------------------------------------------------------------- a bad day's step
def test_512_requests_at_once_against_a_server_that_fails_every_way(tmp_path: Path) -> None:
    """Drops 5 %, hangs past every deadline for 5 %, nonsense for 5 %; 429, 500, half-closed, trickled and broken replies."""
    kinds = ["drop", "hang", "text:no idea", "status:429:0.05", "status:500", "half", "trickle", "garbage", "json"]
    first: dict[str, str] = {}

    def behave(number: int, body: dict[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        index = int(text.split("answer number ")[1].split()[0])
        kind = kinds[index % 20] if index % 20 < len(kinds) else "score:0.75"
        if kind in ("hang", "text:no idea"):
            return kind  # every time
        seen, first[text] = first.get(text), kind
        return "score:0.75" if seen else kind  # the others only at first

    with serving(behave) as server:
        reward = make(server.url, max_in_flight=512, request_seconds=10.0, retries=1)
        reward.open(tmp_path, 0, 1)
        got = scores(reward, [f"answer number {i} " for i in range(512)])
        counts, _ = reward.take_counts()
        assert len(server.requests) == counts.traffic.requests
    hung = sum(1 for i in range(512) if i % 20 == 1)
    nonsense = sum(1 for i in range(512) if i % 20 == 2)
    assert [score for i, score in enumerate(got) if i % 20 not in (1, 2)] == [0.75] * (512 - hung - nonsense)
    assert got.count(None) == hung + nonsense
    assert (counts.scored, counts.cache_hits) == (512, 0)
    assert counts.no_score == {"failed": hung, "nonsense": nonsense}
    assert counts.traffic.rate_limited == server.done["status"] - sum(1 for i in range(512) if i % 20 == 4)
    assert counts.traffic.retries == counts.traffic.requests - 512
    assert counts.traffic.timeouts >= 2 * hung
    assert counts.traffic.prompt_tokens == 100 * counts.traffic.replies
    adds_up(counts)


@pytest.mark.parametrize("most", [24, 512])
def test_max_in_flight_requests_are_open_at_once_and_no_more(most: int) -> None:
    with serving(f"together:{most}") as server:  # answers once that many are waiting
        reward = make(server.url, max_in_flight=most, request_seconds=60.0)
        assert scores(reward, [f"answer number {i} " for i in range(2 * most)]) == [1.0] * (2 * most)
    assert server.most_open == most


def test_the_steps_deadline_ends_what_is_still_open() -> None:
    with serving(lambda number, _: "hang" if number % 2 else "score:1.0") as server:
        reward = make(server.url, request_seconds=60.0)
        began = time.monotonic()
        got = scores(reward, [f"{i}" for i in range(20)], seconds=1.0)
        assert time.monotonic() - began < 20
        counts, _ = reward.take_counts()
    assert sorted(map(str, got)) == ["1.0"] * 10 + ["None"] * 10
    assert (counts.no_score, counts.traffic.aborted) == ({"expired": 10}, 10)
    adds_up(counts)


@pytest.mark.parametrize(
    ("rule", "value"), [({"unanswered": "drop"}, None), ({"unanswered": "neutral", "neutral": 0.25}, 0.25)]
)
def test_the_recipe_decides_what_no_answer_means(rule: dict[str, Any], value: float | None) -> None:
    with serving("text:I cannot say") as server:
        reward = make(server.url, **rule)
        assert reward.may_abstain == (value is None)
        assert scores(reward, ["a"]) == [value]


def test_the_rule_stop_names_the_endpoint_and_the_reason() -> None:
    with serving("status:500") as server:
        reward = make(server.url, unanswered="stop", retries=1)
        with pytest.raises(EndpointError, match=rf"{server.url}.*HTTP 500"):
            reward("a", SAMPLE)
        assert len(server.requests) == 2


@pytest.mark.parametrize("code", [401, 403, 404])
def test_an_endpoint_that_never_worked_stops_the_run_at_once(code: int) -> None:
    with serving(f"status:{code}") as server:
        with pytest.raises(EndpointError, match=f"HTTP {code}"):
            make(server.url)("a", SAMPLE)
        assert len(server.requests) == 1


def test_a_body_that_the_server_refuses_is_not_sent_again() -> None:
    with serving("status:400") as server:
        assert make(server.url)("too long", SAMPLE) is None
        assert len(server.requests) == 1


def test_a_wait_that_the_server_asks_for_is_kept() -> None:
    with serving(lambda number, _: "score:1.0" if number else "status:429:1") as server:
        began = time.monotonic()
        assert make(server.url)("a", SAMPLE) == 1.0
        assert time.monotonic() - began >= 1.0


def test_nobody_waits_longer_than_for_a_reply() -> None:
    with serving(lambda number, _: "score:1.0" if number else "status:429:86400") as server:
        assert make(server.url, request_seconds=5)("a", SAMPLE) == 1.0


def test_another_server_takes_over() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: refuses connections
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        with serving("score:0.5") as good, serving("status:500") as broken:
            reward = make([dead, good.url, broken.url])
            assert scores(reward, [f"{i}" for i in range(40)]) == [0.5] * 40
            counts, _ = reward.take_counts()
            assert len(good.requests) == 40
            assert counts.traffic.unreachable > 0
            assert counts.traffic.requests == len(good.requests) + len(broken.requests)


@pytest.mark.parametrize(
    "body", ['{"choices": []}', "{}", '{"choices": [{}]}', '{"error": "busy"}', '{"choices": null}']
)
def test_a_reply_without_a_message_is_a_fault_of_the_server_s_and_the_question_is_asked_again(body: str) -> None:
    with serving(lambda number, _: "score:0.75" if number else f"raw:{body}") as server:
        reward = make(server.url, retries=1)
        assert reward("a", SAMPLE) == 0.75
        counts, _ = reward.take_counts()
        assert (counts.no_score, counts.traffic.errors, counts.traffic.retries) == ({}, 1, 1)


# ----------------------------------------------------------------------------------------------------------------- recipe
def test_what_is_sent_is_what_the_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    (tmp_path / "t.txt").write_text("Grade {completion} for {prompt}; {json: braces} stay. {answer}")
    with serving("score:1.0") as server:
        params = {"template": str(tmp_path / "t.txt"), "api_key_env": "MY_KEY", "body": {"top_p": 0.5}}
        assert make(server.url, **params)("this", {**SAMPLE, "answer": 7}) == 1.0
        path, body, headers = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer s3cret"
    content = "Grade this for What is the weather in Oslo?; {json: braces} stay. 7"
    assert body == {"model": "m", "messages": [{"role": "user", "content": content}], "top_p": 0.5}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"urls": "localhost:8000"}, "not a URL"),
        ({"urls": "ftp://host/v1"}, "not a URL"),
        ({"urls": []}, "at least one"),
        ({"urls": 7}, "must be text or a list"),
        ({"urls": "http://me:pw@host/v1"}, "api_key_env"),
        ({"unanswered": "ignore"}, "drop, neutral, stop"),
        ({"neutral": float("nan")}, "neutral"),
        ({"neutral": 0.3}, "neutral = 0.3 does nothing with unanswered: drop; set unanswered: neutral"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE is not set"),
        ({"api_key_env": "sk-abc-123"}, "NAME"),
        ({"template": "/nowhere"}, "cannot read"),
        ({"body": {"messages": []}}, "body.messages"),
        ({"body": {"model": "x"}}, "parameter model"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"retries": 1.5}, "retries"),
        ({"max_requests_per_run": 0}, "max_requests_per_run"),
        ({"step_seconds": -1}, "step_seconds"),
        ({"model": ""}, "model"),
        ({"tempature": 1}, "tempature"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward("judge", **{"urls": "http://localhost:1/v1", "model": "m", **params})


def test_a_template_must_show_what_is_graded(tmp_path: Path) -> None:
    for text, message in (("Grade {prompt}", "completion"), ("{completion} {promt}", "promt")):
        (tmp_path / "t.txt").write_text(text)
        with pytest.raises(ValueError, match=message):
            make("http://localhost:1/v1", template=str(tmp_path / "t.txt"))
