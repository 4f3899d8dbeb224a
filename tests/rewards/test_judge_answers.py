"""Answers of a judge: each question is asked once, kept, read again by any rank and after a restart, and paid for."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_rl.rewards.remote import RemoteReward

from .chat_server import serving
from .judging import SAMPLE, make, scores


def test_the_same_question_is_asked_once(tmp_path: Path) -> None:
    with serving("score:0.9", work_seconds=0.2) as server:
        reward = make(server.url)
        reward.open(tmp_path, 0, 1)
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: reward("the same", SAMPLE), range(8))) == {0.9}
        assert reward("the same", SAMPLE) == 0.9
        assert len(server.requests) == 1
        counts, _ = reward.take_counts()
        assert (counts.scored, counts.cache_hits, counts.traffic.requests) == (9, 8, 1)
        other = make(server.url, body={"temperature": 0.5})
        other.open(tmp_path, 0, 1)
        assert other("the same", SAMPLE) == 0.9
        assert len(server.requests) == 2  # another temperature is another question


def test_a_restart_does_not_ask_again_even_after_a_torn_line(tmp_path: Path) -> None:
    def behave(_: int, body: dict[str, Any]) -> str:
        return "text:hm" if "odd" in body["messages"][-1]["content"] else "score:0.25"

    with serving(behave) as server:
        first = make(server.url)
        first.open(tmp_path, 1, 2)
        assert [first("a", SAMPLE), first("odd", SAMPLE)] == [0.25, None]
        with (tmp_path / "rank1.jsonl").open("a") as file:
            file.write('{"key": "torn')
        again = make(server.url)
        again.open(tmp_path, 1, 4)  # another number of ranks
        assert [again("a", SAMPLE), again("odd", SAMPLE)] == [0.25, None]
        assert again("b", SAMPLE) == 0.25
        assert len(server.requests) == 3
        third = make(server.url)
        third.open(tmp_path, 0, 1)
        assert third("b", SAMPLE) == 0.25
        assert len(server.requests) == 3
        counts, _ = again.take_counts()
        assert (counts.cache_hits, counts.no_score) == (2, {"nonsense": 1})
        assert counts.example == "the reply held no score: 'hm'"


def test_what_the_judge_said_is_found_by_any_rank_and_after_a_restart(tmp_path: Path) -> None:
    with serving(
        lambda number, _: "text:No tool is called \u2014 hm" if number else 'text:It is right. {"score": 1.0}'
    ) as server:
        asking, other = make(server.url), make(server.url)
        asking.open(tmp_path / "answers" / "judge", 1, 2)
        other.open(tmp_path / "answers" / "judge", 0, 2)
        assert scores(asking, ["a"]) + scores(asking, ["b"]) == [1.0, None]
        other.learn(*asking.take_counts())
    restarted = make(server.url)
    restarted.open(tmp_path / "answers" / "judge", 0, 1)
    for reward in (asking, other, restarted):
        assert reward.remarks("a", SAMPLE) == [('It is right. {"score": 1.0}', None)]
        assert reward.remarks("b", SAMPLE) == [("No tool is called \u2014 hm", None)]
        assert reward.remarks("never asked", SAMPLE) == []
    (tmp_path / "answers" / "judge" / "rank1.jsonl").write_text("")
    [(words, _)] = other.remarks("a", SAMPLE)
    assert words.startswith("[the reply cannot be read from rank1.jsonl")


def test_ranks_learn_each_others_answers(tmp_path: Path) -> None:
    with serving("score:0.25") as server:
        ranks = [make(server.url), make(server.url)]
        for rank, reward in enumerate(ranks):
            reward.open(tmp_path, rank, 2)
        ranks[0]("a", SAMPLE)
        taken = [reward.take_counts() for reward in ranks]
        for reward in ranks:
            for counts, news in taken:
                reward.learn(counts, news)
        assert ranks[1]("a", SAMPLE) == 0.25
        assert len(server.requests) == 1


def test_the_budget_of_a_run_holds_across_ranks_and_restarts(tmp_path: Path) -> None:
    limits = {"max_requests_per_run": 21, "max_in_flight": 4}
    with serving("score:1.0") as server:

        def step(ranks: list[RemoteReward], name: str) -> int:
            before = len(server.requests)
            for reward in ranks:
                reward.begin_step(1)
            for part in range(2):  # two rounds of one step
                for rank, reward in enumerate(ranks):
                    scores(reward, [f"{name} {part} {rank} {i}" for i in range(4)])
                taken = [reward.take_counts() for reward in ranks]
                assert sum(c.scored for c, _ in taken) == 8
                assert sum(c.no_score["budget"] for c, _ in taken) == 8 - sum(c.traffic.requests for c, _ in taken)
                for reward in ranks:
                    for counts, news in taken:
                        reward.learn(counts, news)
            return len(server.requests) - before

        def start() -> list[RemoteReward]:
            ranks = [make(server.url, **limits), make(server.url, **limits)]
            for rank, reward in enumerate(ranks):
                reward.open(tmp_path, rank, 2)
            return ranks

        ranks = start()
        assert step(ranks, "one") == 16
        ranks = start()
        assert [step(ranks, "two"), step(ranks, "three")] == [5, 0]


def test_a_budget_of_tokens_counts_what_the_server_reports() -> None:
    with serving("score:1.0") as server:  # 107 tokens each
        reward = make(server.url, max_tokens_per_run=250, max_in_flight=1)
        assert scores(reward, ["a", "b", "c", "d", "e"]).count(None) == 2
        assert len(server.requests) == 3


def test_the_answers_on_disk_can_be_read(tmp_path: Path) -> None:
    behave: Callable[..., str] = lambda number, _: "text:hm" if number else 'text:I think {"score": 0.5}'  # noqa: E731
    with serving(behave) as server:
        reward = make(server.url)
        reward.open(tmp_path, 0, 1)
        reward.begin_step(7)
        reward("a", SAMPLE)
        reward("b", SAMPLE)
        counts, _ = reward.take_counts()
    answer, other, details = map(json.loads, (tmp_path / "rank0.jsonl").read_text().splitlines())
    assert (answer["score"], answer["reply"], other["score"]) == (0.5, 'I think {"score": 0.5}', None)
    assert (details["step"], details["scored"], details["requests"], details["tokens"]) == (7, 2, 2, 214)
    assert details["no_score"] == {"nonsense": 1}
    assert counts.example == "the reply holds no score: 'hm'"
    assert (details["replies"], details["prompt_tokens"], details["retries"]) == (2, 200, 0)
    assert 0 < details["latency_mean"] <= details["latency_max"]
    metrics = counts.metrics("judge")
    assert details["latency_mean"] <= metrics.pop("judge/latency_p95") <= details["latency_max"]
    names = ("scored", "cache_hits", "no_score", "retries", "tokens")
    assert metrics == dict(zip((f"judge/{name}" for name in names), (2, 0, 1, 0, 214), strict=True))
