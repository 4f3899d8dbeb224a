"""The teacher's reward per token against its definition, and the teachers that a run refuses."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2_5_VLConfig

from megatron_rl.config import ConfigError, Machine, load_recipe
from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.sample import SampleMapping
from megatron_rl.preflight.recipe import check_recipe
from megatron_rl.rewards import InlineReward, Scorer, make_reward
from megatron_rl.rewards.remote import RemoteReward

from .chat_server import Behave, serving
from .tiny_models import chat_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("teacher") / "model")


def drawn(seed: int) -> SampleMapping:
    """A rollout of two turns with something between, in ids of `chat_model`."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 12, 4)  # prompt, turn, tool, turn
    mask = np.repeat([False, True, False, True], sizes)
    log_probs = -rng.exponential(size=mask.sum()).astype(np.float32)
    return cast(
        SampleMapping, {"token_ids": rng.integers(3, 90, sizes.sum()), "loss_mask": mask, "logprobs": log_probs}
    )


def test_the_reward_is_the_difference_of_the_log_probs_whatever_shares_the_batch(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rollouts: list[Any] = [drawn(seed) for seed in range(9)]
    reward = make_reward("teacher", path=str(folder), batch_tokens=70)
    assert isinstance(reward, InlineReward)
    assert reward.per_token
    for rollout, found in zip(rollouts, reward.scores([""] * 9, rollouts), strict=True):
        logits = model(torch.from_numpy(rollout["token_ids"])[None]).logits[0].detach()
        expected = [
            float(logits[i - 1].log_softmax(-1)[rollout["token_ids"][i]]) for i in np.flatnonzero(rollout["loss_mask"])
        ]
        assert found == pytest.approx(np.array(expected) - rollout["logprobs"], abs=1e-5)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({}, "give either urls .* or path"),
        ({"urls": "http://localhost:1/v1"}, "model is missing"),
        ({"path": "nowhere"}, "nowhere is not a Hugging Face folder: it has no config.json"),
        ({"urls": "http://localhost:1/v1", "model": "m", "unanswered": "neutral"}, "unanswered"),
        ({"urls": "localhost", "model": "m"}, "is not a URL"),
        ({"urls": "http://localhost:1/v1", "model": "m", "batch_tokens": 9}, "batch_tokens does nothing beside urls"),
        ({"urls": "http://localhost:1/v1", "model": "m", "device": "cpu"}, "device does nothing beside urls"),
        ({"path": "nowhere", "model": "m"}, "model does nothing beside path"),
        ({"path": "nowhere", "retries": 9}, "retries does nothing beside path"),
        ({"path": "nowhere", "unanswered": "stop"}, "unanswered does nothing beside path"),
    ],
)
def test_what_is_no_teacher_is_refused_with_the_recipe(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_reward("teacher", **params)


@pytest.mark.parametrize("command", ["train", "sft", "evaluate"])
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["trainer.eval_reward=teacher"], "trainer.eval_reward"),
        (["evaluation.format_reward=teacher"], "evaluation.format_reward"),
        (["rewards.correct=null", "rewards.format=null", "rewards.judge=null"], "tasks.eval.chain_sum_test"),
    ],
)
def test_no_evaluation_begins_that_would_read_a_number_per_rollout_of_it(
    overrides: list[str], key: str, command: str, folder: Path
) -> None:
    recipe = load_recipe(ROOT / "recipes/cpu/distillation.yaml", [f"rewards.teacher.params.path={folder}", *overrides])
    with pytest.raises(ConfigError, match=rf"`{key}` .*teacher.* a number per token"):
        check_recipe(recipe, command, Machine(gpus=0))


def test_a_teacher_that_reads_other_tokens_or_does_not_answer_is_refused_before_the_run(
    folder: Path, tmp_path: Path
) -> None:
    if not torch.cuda.is_available():
        on_gpu = make_reward("teacher", path=str(folder), device="cuda")
        with pytest.raises(ValueError, match="no GPU"):
            on_gpu.check_tokenizer(AutoTokenizer.from_pretrained(folder))
    mine, other = (AutoTokenizer.from_pretrained(path) for path in (folder, chat_model(tmp_path / "b", "cba")))
    scorer = Scorer({"teacher": RewardConfig(reward="teacher", params={"path": str(folder)})})
    scorer.check_tokenizer(mine)
    with pytest.raises(
        ValueError, match=r"rewards\.teacher: the teacher has another vocabulary .* token \d+ is '.' there"
    ):
        scorer.check_tokenizer(other)
    with serving(lambda *_: "status:404") as server:
        for url, reason in ((server.url, "HTTP 404"), ("http://127.0.0.1:9/v1", "not reachable")):
            params = {"urls": url, "model": "big", "backoff_seconds": 0.01}
            absent = Scorer({"teacher": RewardConfig(reward="teacher", params=params)})
            with pytest.raises(ValueError, match=rf"rewards\.teacher: .*{reason}.*`vllm serve`.* the name 'big'"):
                absent.check_tokenizer(mine)
            absent.close()


def reply(entries: object) -> str:
    return "raw:" + json.dumps({"choices": [{"prompt_logprobs": entries}]})


def test_the_rows_of_a_teacher_that_reads_images_are_its_decoders(folder: Path, tmp_path: Path) -> None:
    with_images = shutil.copytree(folder, tmp_path / "teacher")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for rows in (len(tokenizer), len(tokenizer) - 1):
        config = Qwen2_5_VLConfig(text_config={"vocab_size": rows})
        config.save_pretrained(with_images)
        assert "vocab_size" not in json.loads((with_images / "config.json").read_text())
        teacher = make_reward("teacher", path=str(with_images))
        with contextlib.nullcontext() if rows == len(tokenizer) else pytest.raises(ValueError, match=f"{rows} rows"):
            teacher.check_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        *(
            (f"raw:{body}", "failed")
            for body in ('{"choices": ["no"]}', '{"choices": {}}', '{"choices": [{}]}', "<html>")
        ),
        *(
            (reply(entries), "nonsense")
            for entries in ([], [None], [None, {}], ["a", "b"], [None, {"8": {"logprob": -1}}])
        ),
        *(
            (reply([None, {"7": entry}]), "nonsense")
            for entry in (None, -1.0, {}, *({"logprob": value} for value in (None, "-1", True, 4.5, -(10**400), [-1])))
        ),
        *((reply([None, {"7": {"logprob": value}}]), "nonsense") for value in (float("nan"), float("-inf"))),
    ],
)
def test_what_is_not_the_log_probs_of_the_rollouts_tokens_is_no_reward(said: str, kind: str) -> None:
    """The rollout goes without a reward of the teacher; the run goes on."""
    rollout = {"token_ids": np.array([3, 7]), "loss_mask": np.array([False, True]), "logprobs": np.float32([-0.5])}
    with serving(said) as server:
        reward = make_reward("teacher", urls=server.url, model="big", retries=0)
        assert isinstance(reward, RemoteReward)
        assert reward.submit("", cast(SampleMapping, rollout)).result(10) is None
        assert reward.take_counts()[0].no_score == {kind: 1}
        reward.close()


def test_the_start_leaves_each_rank_its_part_of_the_requests_in_flight(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def behave(number: int, body: dict[str, Any]) -> str:
        read = [{str(token): {"logprob": -1, "decoded_token": tokenizer.decode([token])}} for token in body["prompt"]]
        return reply([None, *read[1:]])

    answering: Behave = behave
    with serving(answering, work_seconds=0.05) as server:
        params = {"urls": server.url, "model": "big", "max_in_flight": 8}
        scorer = Scorer({"teacher": RewardConfig(reward="teacher", params=params)})
        scorer.check_tokenizer(tokenizer)
        scorer.open(tmp_path, rank=0, world=4)
        [reward] = scorer._remote.values()
        for score in [reward.submit("", drawn(seed)) for seed in range(12)]:
            score.result(10)
        assert server.most_open == 2
        scorer.close()
