"""The agent `tools`: a policy that says what it is told to, in houses and with tools that raise, flood and hang."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_rl.agents.demonstrated import conversation_ids
from megatron_rl.agents.environments import environment_maker
from megatron_rl.agents.registry import make_agent
from megatron_rl.agents.rendering import Renderer
from megatron_rl.config import load_recipe
from megatron_rl.config.schema import Config
from megatron_rl.data.rollout import Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation.samples import conversation_of
from megatron_rl.rollout.engine import Completion, Failure
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.tasks.demonstrations import hermes_call
from megatron_rl.tasks.loading import load_task
from megatron_rl.trainer.step_metrics import conversation_metrics
from megatron_rl.weights.create import write_tokenizer
from tests.agents import talking

RECIPE = Path(__file__).parents[2] / "recipes" / "cpu" / "tool_house.yaml"
HERE = Path(__file__)


class Scripted(talking.Arithmetic):
    """An engine that answers with what `say` makes of the text so far."""

    def __init__(self, words: Any, say: Callable[[str], str]) -> None:
        super().__init__()
        self._words, self._say = words, say

    def step(self) -> list[Completion | Failure]:
        waiting, self._queue = self._queue, []
        return [self._complete(request) for request, _ in waiting]

    def _complete(self, request: Any) -> Completion:
        said = self._say(self._words.decode(request.tokens))
        ids = [*self._words.encode(said, add_special_tokens=False), 1][: request.sampling.max_tokens]
        nothing = np.zeros(0, dtype=np.float32)
        reason, experts = "stop" if ids[-1] == 1 else "length", talking.routed([*request.tokens, *ids])
        return Completion(request, ids, [-0.5] * len(ids), reason, self.version, nothing, experts)


@pytest.fixture(scope="module")
def recipe() -> Config:
    return load_recipe(RECIPE)


@pytest.fixture(scope="module")
def words(recipe: Config, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("words")
    assert recipe.model.create is not None
    write_tokenizer(folder, recipe.model.create)
    return AutoTokenizer.from_pretrained(str(folder))


def conversed(
    config: Config,
    words: Any,
    prompts: Sequence[Sample],
    say: Callable[[str], str],
    tokens: int = 96,
    journal: tuple[Path, str] | None = None,
) -> Rollouts:
    with talking.hosted(config, words) as conversations:
        rollouts = talking.conversed(conversations, prompts, 1, Scripted(words, say), tokens, journal)
        assert not conversations.take_lost()
        return rollouts


def houses(config: Config, words: Any, size: int, **changes: Any) -> list[Sample]:
    return load_task("house", replace(config.tasks.train["house"], size=size, **changes), words)


def scripts(prompts: Sequence[Sample]) -> Callable[[str], str]:
    """Says the demonstrations of these prompts, each turn of them behind the turns before."""
    answers: dict[str, str] = {}
    for sample in prompts:
        so_far = f"{sample.prompt}\n>"
        assert isinstance(sample.demonstration, list)
        for message in sample.demonstration:
            if message["role"] == "assistant":
                answers[so_far] = str(message["content"])
                so_far += f"{message['content']}<eos>\n"
            else:
                so_far += f"={message['content']}\n>"
    return answers.__getitem__


def test_a_demonstrated_conversation_has_the_tokens_of_a_rollout_that_says_the_same(recipe: Config, words: Any) -> None:
    """And is worth what it shows: the gold way all, the one that guesses next to nothing."""
    by_prompt = {sample.prompt: sample for sample in houses(recipe, words, 60)}  # one house for each request
    prompts = list(by_prompt.values())
    rollouts = conversed(recipe, words, prompts, scripts(prompts))
    succeeded = 0
    for row, sample in enumerate(prompts):
        rollout = rollouts.held[row]
        assert isinstance(sample.demonstration, list)
        ids, learned = conversation_ids(Renderer(words, {}), sample, sample.demonstration, "hermes")
        np.testing.assert_array_equal(rollout.tokens, [*sample.prompt_ids, *ids])
        np.testing.assert_array_equal(rollout.loss_mask[len(sample.prompt_ids) :], learned)
        assert words.decode(ids[~learned]).replace("\n", "").replace("=", "").split(">")[:-1] == [
            message["content"] for message in sample.demonstration if message["role"] == "tool"
        ]
        reads = any("read" in str(message["content"]) for message in sample.demonstration)
        assert rollout.agent_rewards["success"] == reads
        assert (rollout.agent_rewards["steps"] == 1.0) == reads
        assert rollout.turn_rewards.keys() == {"turns"}
        assert len(rollout.turn_rewards["turns"]) == len(rollout.turn_lengths)
        assert rollout.agent_rewards["turns"] == pytest.approx(rollout.agent_rewards["steps"])
        assert rollout.failed_by is None
        succeeded += reads
    assert 2 <= succeeded < len(prompts) / 2


def test_the_metrics_of_conversations_are_those_counted_in_their_text(recipe: Config, words: Any) -> None:
    prompts = list({sample.prompt: sample for sample in houses(recipe, words, 60)}.values())
    say = scripts(prompts)
    strange = hermes_call({"name": "fly", "parameters": {}})
    dropped = prompts[0].prompt

    def saying(so_far: str) -> str:
        return strange if so_far.startswith(f"{dropped}\n") else say(so_far)  # until its turns are used up

    rollouts = conversed(recipe, words, prompts, saying, tokens=400)
    texts = [words.decode(rollouts.held[row].tokens) for row in range(len(prompts))]
    metrics = conversation_metrics(ALONE, rollouts)
    turns = [text.count("<eos>") for text in texts]
    calls = re.findall(r'"name": "(\w+)"', "".join(texts))
    assert metrics["conversation/turns"] == pytest.approx(np.mean(turns))
    assert metrics["conversation/turns_max"] == max(turns) == 6
    assert metrics["conversation/tool_calls"] == pytest.approx(len(calls) / len(texts))
    assert metrics["conversation/failed_model"] == pytest.approx(1 / len(texts))
    assert metrics["conversation/failed_infrastructure"] == 0
    for name in ("friend", "find", "read", "open"):
        assert metrics[f"conversation/calls/{name}"] == pytest.approx(calls.count(name) / len(texts))
    assert metrics["conversation/calls/unlisted"] == pytest.approx(6 / len(texts))
    assert not any("fly" in name for name in metrics)
    pieces = [re.findall(r">([^>]*?(?:<tool_call>.*?</tool_call>)?)<eos>", text, re.DOTALL) for text in texts]
    for turn in range(1, 7):
        tokens = [len(words.encode(of_text[turn - 1])) + 1 for of_text in pieces if len(of_text) >= turn]
        assert metrics[f"conversation/turn_{turn}/share"] == pytest.approx(len(tokens) / len(texts))
        assert metrics[f"conversation/turn_{turn}/tokens"] == pytest.approx(np.mean(tokens))
    spoken = [rollouts.held[row] for row in range(len(prompts)) if rollouts.held[row].failed_by is None]
    for turn in range(1, 6):
        of_turn = [r.turn_rewards["turns"][turn - 1] for r in spoken if len(r.turn_lengths) >= turn]
        assert metrics[f"conversation/turn_reward/turns/{turn}"] == pytest.approx(np.mean(of_turn))
    assert "conversation/turn_reward/turns/6" not in metrics, "the policy broke it off"
    drawn = sum(len(words.encode(said)) + 1 for of_text in pieces for said in of_text)
    whole = sum(len(words.encode(text)) for text in texts) - sum(len(sample.prompt_ids) for sample in prompts)
    assert metrics["conversation/environment_tokens"] == pytest.approx((whole - drawn) / len(texts))


def test_a_written_conversation_has_the_messages_after_the_prompt_and_its_turns_tokens(
    recipe: Config, words: Any
) -> None:
    [sample] = houses(recipe, words, 1, demonstration_params={"shortcut": 0.0})
    rollout = conversed(recipe, words, [sample], scripts([sample])).held[0]
    written: Any = conversation_of(sample, rollout)
    assert isinstance(sample.demonstration, list)
    roles = [message["role"] for message in written["conversation"]]
    assert roles == [message["role"] for message in sample.demonstration]
    assert sum(written["turn_tokens"]) == rollout.length
    assert len(written["turn_tokens"]) == roles.count("assistant")
    assert [m["tool_calls"][0]["function"]["name"] for m in written["conversation"] if m.get("tool_calls")] == [
        call["name"] for call in sample.tool_calls or ()
    ]


# ------------------------------------------------------------------------------------------------------- tools that fail
class lost(Exception):
    """Says nothing."""


class Workshop:
    """Tools of a user's, some of which fail."""

    def __init__(self, limit: int = 3) -> None:
        if limit < 1:
            raise ValueError("limit must be at least 1")
        self._limit = limit

    def reset(self, task: Mapping[str, Any]) -> Sequence[Mapping[str, object]]:
        self._thread = threading.current_thread().name
        tools: list[Mapping[str, object]] = task["tools"]
        return tools

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "raise":
            raise lost
        if name == "say":
            raise RuntimeError("no paint left")
        if name == "flood":
            return "x" * 10**6
        if name == "hang":
            time.sleep(30.0)
        return self._thread

    def reward(self, task: Mapping[str, object], messages: Sequence[Mapping[str, object]]) -> float:
        return float(self._limit)


class Studio(Workshop):
    """The same, but its calls are coroutines."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:  # type: ignore[override]
        if name == "hang":
            await asyncio.sleep(30.0)
        if name == "late":
            raise TimeoutError("busy")
        return "drawn"


class Till(Workshop):
    """Counts its calls, and replies otherwise each day."""

    day = 0

    def reset(self, task: Mapping[str, Any]) -> Sequence[Mapping[str, object]]:
        Till.day, self._calls = Till.day + 1, 0
        return super().reset(task)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        self._calls += 1
        if name == "raise" and Till.day > 1:
            raise lost
        return f"{self._calls} on day {Till.day}"

    def reward(self, task: Mapping[str, object], messages: Sequence[Mapping[str, object]]) -> float:
        return float(self._calls)


@pytest.fixture
def workshop(recipe: Config, words: Any) -> Callable[..., Any]:
    def replies(
        environment: str, *calls: str, journal: tuple[Path, str] | None = None, **params: Any
    ) -> tuple[list[str], Any]:
        """The replies that the model sees to calls of these tools, one after the other; and the rollout."""
        task = replace(recipe.tasks.train["house"], size=1, demonstrations=None, demonstration_params={})
        assert task.agent is not None
        agent = {"environment": f"{HERE}:{environment}", "tool_seconds": 0.5, "longest_reply": 20, **params}
        task.agent = replace(task.agent, params=agent, model_failed=-2.0)
        config = replace(recipe, tasks=replace(recipe.tasks, train={"house": task}))

        def say(so_far: str) -> str:
            turn = so_far.count("<eos>")
            return hermes_call({"name": calls[turn], "parameters": {}}) if turn < len(calls) else "done"

        rollout = conversed(config, words, load_task("house", task, words), say, 400, journal).held[0]
        return [str(m["content"]) for m in rollout.messages if m["role"] == "tool"], rollout

    return replies


def test_what_a_tool_raises_floods_is_a_reply_like_any_other(workshop: Callable[..., Any]) -> None:
    replies, rollout = workshop("Workshop", "raise", "say", "flood", environment_params={"limit": 2})
    assert replies == ["error: lost", "error: no paint left", f"{'x' * 20} ... 999980 more characters"]
    assert rollout.failed_by is None
    assert rollout.agent_rewards == {"reward": 2.0}


@pytest.mark.parametrize("environment", ["Workshop", "Studio"])
def test_a_tool_that_hangs_costs_its_conversation_the_limit_and_no_other(
    environment: str, workshop: Callable[..., Any]
) -> None:
    begin = time.monotonic()
    replies, rollout = workshop(environment, "work", "hang")
    assert time.monotonic() - begin < 10
    assert replies == ["call" if environment == "Workshop" else "drawn"]
    assert rollout.failed_by == "model"
    assert rollout.agent_rewards == {"*": -2.0}


def test_after_a_kill_an_environment_comes_to_where_it_was_and_the_model_sees_what_it_said_then(
    workshop: Callable[..., Any], tmp_path: Path
) -> None:
    Till.day, calls = 0, ("say", "raise", "say")
    (tmp_path / "whole").mkdir()
    seen, whole = workshop("Till", *calls, journal=(tmp_path / "whole", "w"))
    assert (seen, whole.agent_rewards) == ([f"{n} on day 1" for n in (1, 2, 3)], {"reward": 3.0})
    lines = (tmp_path / "whole" / "engine_0").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 3 + 1 + 1  # its origin, turns and replies, the last turn, the rollout
    for count in range(1, len(lines)):
        Till.day, folder = 0 if count < 3 else 1, tmp_path / f"{count}"  # no reply of an earlier day is there to see
        folder.mkdir()
        (folder / "engine_0").write_bytes(b"".join(lines[:count]))
        again, rollout = workshop("Till", *calls, journal=(folder, "w"))
        known = (count - 1) // 2
        assert again[:known] == seen[:known]
        assert rollout.agent_rewards == whole.agent_rewards, "the calls were made again"


def test_a_tool_s_words_about_its_time_are_not_taken_for_the_deadline(workshop: Callable[..., Any]) -> None:
    assert workshop("Studio", "late")[0] == ["error: busy"]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("tool_hause", {}, "did you mean 'tool_house'"),
        ("tool_house", {"rooms": 3}, "rooms"),
        (f"{HERE}:Workshop", {"limit": 0}, "limit must be at least 1"),
        (f"{HERE}:Scripted", {}, "'words' is missing"),
        ("fractions:Fraction", {}, "has no method 'reset'"),
    ],
)
def test_an_environment_is_refused_before_the_run(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment_maker(name, params)


class Bazaar:
    """Whatever its recipe sells."""

    def __init__(self, *sellers: str, **prices: int) -> None:
        self.prices = prices

    def reset(self, task: Any) -> list[Any]:
        return []

    call = reward = reset


def haggler(**prices: int) -> Any:
    async def run(model: Any, task: Any) -> float:
        return float(len(prices))

    return run


def test_a_factory_may_take_any_parameters() -> None:
    assert environment_maker(f"{HERE}:Bazaar", {"lamp": 3})().prices == {"lamp": 3}  # type: ignore[attr-defined]
    for prices in ({}, {"lamp": 3}):
        make_agent(f"{HERE}:haggler", **prices)


def test_a_reply_is_cut_to_some_characters() -> None:
    with pytest.raises(ValueError, match="`longest_reply` must be at least 1; it is -5"):
        make_agent("tools", environment="tool_house", longest_reply=-5)
