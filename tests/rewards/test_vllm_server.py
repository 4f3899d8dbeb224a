"""The judge and the reward model speak to vLLM's own server, of tiny random models: nothing of it is made up here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from e2e.serving import VllmServer
from transformers import AutoTokenizer

from megatron_rl.rewards import InlineReward, make_reward
from megatron_rl.rewards.judge import TIERS
from megatron_rl.rewards.remote import RemoteReward
from tests.actor.processes import spawn

from .judging import SAMPLE, adds_up, scores
from .test_teacher import drawn
from .tiny_models import CHAT_TEMPLATE, chat_model, classifier, export_reward_model

pytestmark = pytest.mark.engine

SCHEMA = {"type": "object", "properties": {"score": {"enum": list(TIERS)}}, "required": ["score"]}
GUIDES = {
    "structured_outputs": {"choice": [f'{{"score": {tier}}}' for tier in TIERS]},  # as docs/rewards/judge.md has it
    "response_format": {"type": "json_schema", "json_schema": {"name": "grade", "schema": SCHEMA}},  # OpenAI's own
}
CHAT = [{"role": "user", "content": "hello?"}]
LONG = "".join(chr(97 + i % 26) for i in range(700))  # tokens; the classifier takes 512


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """Base URLs of the judge, whose model teaches too, and of the reward model, and the reward model's folder."""
    folder = tmp_path_factory.mktemp("served")
    options = ("--chat-template", CHAT_TEMPLATE, "--distributed-executor-backend", "uni")
    chat = VllmServer(chat_model(folder / "chat"), folder / "chat.log", "--max-model-len", "4096", *options)
    spawn(export_reward_model, 1, str(classifier(folder / "policy")), str(folder / "scorer"))
    scorer = VllmServer(folder / "scorer", folder / "scorer.log", "--runner", "pooling", *options)
    try:
        yield chat.url(), scorer.url().removesuffix("/v1"), folder / "scorer"
    finally:
        chat.stop()
        scorer.stop()
        shutil.rmtree(folder)


def served(url: str, name: str = "judge", **params: Any) -> RemoteReward:
    reward = make_reward(name, urls=url, model="tiny", **params)
    assert isinstance(reward, RemoteReward)
    return reward


def test_a_random_model_is_no_judge_and_that_is_counted(servers: tuple[str, str, Path]) -> None:
    with closing(served(servers[0], body={"temperature": 0, "max_tokens": 8})) as reward:
        assert scores(reward, [f"answer {i}" for i in range(16)], 120) == [None] * 16
    counts, _ = reward.take_counts()
    assert (counts.no_score, counts.traffic.requests, counts.traffic.completion_tokens) == ({"nonsense": 16}, 16, 128)
    adds_up(counts)


@pytest.mark.parametrize("guide", list(GUIDES))
def test_guided_to_the_tiers_it_grades(servers: tuple[str, str, Path], guide: str) -> None:
    # No seed: with the same one for all requests a random model grades all of them alike.
    with closing(served(servers[0], body={"temperature": 1, "max_tokens": 60, guide: GUIDES[guide]})) as reward:
        grades = scores(reward, [f"answer {i}" for i in range(32)], 120)
    assert set(grades) <= set(TIERS)
    assert len(set(grades)) > 1
    counts, _ = reward.take_counts()
    assert (counts.no_score, counts.traffic.replies) == ({}, 32)


@pytest.mark.parametrize(
    ("text", "body", "reason"),
    [("x" * 20_000, {"max_tokens": 8}, "maximum context length is 4096"), ("x", {"temperature": -1}, "temperature")],
)
def test_what_the_server_refuses_is_asked_once_and_the_reason_is_told(
    servers: tuple[str, str, Path], text: str, body: dict[str, Any], reason: str
) -> None:
    with closing(served(servers[0], body=body)) as reward:
        assert reward(text, SAMPLE) is None
    counts, _ = reward.take_counts()
    assert (counts.no_score, counts.traffic.requests, counts.traffic.errors) == ({"refused": 1}, 1, 1)
    assert "HTTP 400" in counts.example
    assert reason in counts.example


@pytest.mark.parametrize("max_tokens", [None, 10])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("a text ", "goes on"),
        (CHAT, "hi"),
        (CHAT, "a longer answer, with reasons"),
        ("", "x"),
        ("", LONG),
        (CHAT, LONG),
    ],
)
def test_the_served_reward_model_scores_as_transformers_does(
    servers: tuple[str, str, Path], prompt: Any, text: str, max_tokens: int | None
) -> None:
    local = make_reward("reward_model", path=str(servers[2]), max_tokens=max_tokens)
    with closing(served(servers[1], "reward_model", max_tokens=max_tokens)) as reward:
        score = reward(text, {"prompt": prompt})
    assert score == pytest.approx(local(text, {"prompt": prompt}), rel=1e-5, abs=1e-5)


def test_the_served_teacher_finds_each_token_as_probable_as_transformers_does(
    servers: tuple[str, str, Path], tmp_path: Path
) -> None:
    """And refuses a policy whose tokens mean something else to it."""
    folder = chat_model(tmp_path / "chat")
    local = make_reward("teacher", path=str(folder), batch_tokens=50)
    rollouts = [drawn(seed) for seed in range(4)]
    with closing(served(servers[0], "teacher")) as reward:
        reward.check_tokenizer(AutoTokenizer.from_pretrained(folder))
        found = [reward.submit("", rollout).result() for rollout in rollouts]
        with pytest.raises(ValueError, match="another vocabulary than the policy: token"):
            reward.check_tokenizer(AutoTokenizer.from_pretrained(chat_model(tmp_path / "other", characters="cba")))
    assert isinstance(local, InlineReward)
    for served_scores, scores_here in zip(found, local.scores([""] * 4, rollouts), strict=True):
        assert served_scores == pytest.approx(scores_here, abs=1e-4)
