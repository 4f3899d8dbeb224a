"""A Bradley-Terry model from a folder, and behind a server: here one that is strict about vLLM's protocol."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.sample import Sample
from megatron_rl.rewards import InlineReward, Scorer, make_reward

from .chat_server import serving
from .tiny_models import classifier

CHAT = [{"role": "user", "content": "hello?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("rm"))


def by_transformers(folder: Path, text: str) -> float:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return float(model(ids).logits[0, 0])


def test_a_folder_gives_what_transformers_gives_one_by_one(folder: Path) -> None:
    reward = make_reward("reward_model", path=str(folder), batch_size=3)
    texts = ["", "a", "bc" * 40, "the end.", "x" * 300, "!", "a longer answer than most"]
    prompts: list[Any] = ["hello?", CHAT, "hello?", CHAT, "", CHAT, CHAT]
    assert isinstance(reward, InlineReward)
    scores = list(reward.scores(texts, [{"prompt": prompt} for prompt in prompts]))
    whole = [
        p + text if isinstance(p, str) else f"[user]hello?[assistant]{text}"
        for p, text in zip(prompts, texts, strict=True)
    ]
    expected = [by_transformers(folder, text) for text in whole]
    assert scores == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert max(expected) - min(expected) > 0.1
    assert reward("a", {"prompt": CHAT}) == pytest.approx(expected[1], rel=1e-5, abs=1e-5)


def test_only_the_end_of_a_long_conversation_is_scored(folder: Path) -> None:
    reward = make_reward("reward_model", path=str(folder), max_tokens=10)
    assert reward("x" * 50 + "0123456789", {"prompt": "p"}) == pytest.approx(
        by_transformers(folder, "0123456789"), rel=1e-5
    )


def test_in_a_run_all_rollouts_are_scored_at_once(folder: Path) -> None:
    rewards = {
        "rm": RewardConfig(reward="reward_model", params={"path": str(folder), "squash": "sigmoid"}, tasks=["a"]),
    }
    samples = [Sample(id=f"{task}/0", task=task, prompt="p", prompt_ids=[1]) for task in "aba"]
    rows = Scorer(rewards).score(["x", "y", "z"], samples)
    expected = [1 / (1 + math.exp(-by_transformers(folder, f"p{text}"))) for text in "xz"]
    assert rows[1] == {"rm": 0.0}
    assert [rows[0]["rm"], rows[2]["rm"]] == pytest.approx(expected, rel=1e-5)


def test_a_classifier_with_more_outputs_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 outputs"):
        make_reward("reward_model", path=str(classifier(tmp_path / "two", labels=2)))("a", {"prompt": ""})


def test_a_folder_with_another_models_tokenizer_is_refused_before_the_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the reward model's tokenizer cannot encode 'caf"):
        make_reward("reward_model", path=str(folder)).check_sample({"prompt": "caf\u00e9"})
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 40}))
    reward = make_reward("reward_model", path=str(other))
    reward.check_sample({"prompt": "0"})
    with pytest.raises(ValueError, match=r"its tokenizer has tokens for '~' that its model has not \(40 rows\)"):
        reward.check_sample({"prompt": "~"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there_is_missed_before_the_run(folder: Path) -> None:
    scorer = Scorer({"rm": RewardConfig(reward="reward_model", params={"path": str(folder), "device": "cuda"})})
    with pytest.raises(ValueError, match=r"rewards\.rm: device = 'cuda', and this machine has no GPU"):
        scorer.check_tokenizer(AutoTokenizer.from_pretrained(folder))


def test_behind_a_server_it_speaks_vllms_classify() -> None:
    odd = ["7", {"5": 1}, ["1"], [True]]  # read as 7, 5, 1 and 1 by whoever asks Python for a float
    replies = iter([[2.0], [0.1, 0.9], ["nan"], [-1.0], [10**400], *odd])

    def behave(_: int, body: dict[str, Any]) -> str:
        return "raw:" + json.dumps({"data": [{"index": 0, "label": "LABEL_0", "probs": next(replies)}]})

    with serving(behave) as server:
        reward = make_reward("reward_model", urls=server.url.removesuffix("/v1"), model="rm", retries=0)
        given = [reward(text, {"prompt": CHAT if text == "a" else "p "}) for text in "abcde"]
        assert [reward(text, {"prompt": "p"}) for text in "fghi"] == [None] * 4
        assert given == [2.0, None, None, -1.0, None]  # two outputs, a NaN and what no float can hold are no answer
        path, body, _ = server.requests[0]
        assert path == "/classify"
        messages = [*CHAT, {"role": "assistant", "content": "a"}]
        always = {"model": "rm", "use_activation": False, "truncate_prompt_tokens": -1, "truncation_side": "left"}
        assert body == {**always, "messages": messages, "add_generation_prompt": False}
        assert server.requests[1][1] == {**always, "input": "p b"}


def test_its_tokens_have_a_budget_too() -> None:
    reply = {"data": [{"probs": [0.5]}], "usage": {"prompt_tokens": 100}}
    with serving(lambda number, body: "raw:" + json.dumps(reply)) as server:
        params = {"urls": server.url.removesuffix("/v1"), "model": "rm", "max_tokens_per_run": 150}
        reward = make_reward("reward_model", **params)
        assert [reward(text, {"prompt": "p"}) for text in "abc"] == [0.5, 0.5, None]
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "either urls"),
        ({"urls": "http://h:1", "path": "x", "model": "m"}, "either urls"),
        ({"urls": "http://h:1"}, "model is missing"),
        ({"path": "/nowhere"}, "no config.json"),
        ({"urls": "http://h:1", "model": "m", "squash": "tanh"}, "squash"),
        ({"urls": "http://h:1", "model": "m", "batch_size": 9}, "batch_size does nothing beside urls"),
        ({"urls": "http://h:1", "model": "m", "device": "cpu"}, "device does nothing beside urls"),
        ({"path": "nowhere", "model": "m"}, "model does nothing beside path"),
        ({"path": "nowhere", "unanswered": "stop"}, "unanswered does nothing beside path"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward("reward_model", **params)
