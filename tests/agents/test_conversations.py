"""Conversations over an engine of arithmetic: what is drawn, whatever waits, fails or hangs."""

from __future__ import annotations

import asyncio
import queue
import random
import re
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import numpy as np
import psutil
import pytest

from megatron_rl.agents import endpoint, leader
from megatron_rl.agents.failures import AgentsFailed
from megatron_rl.agents.host import Conversations
from megatron_rl.agents.template_remarks import template_remarks_of_folder
from megatron_rl.config import ConfigError, Machine, load_recipe
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.data.rollout import Rollouts
from megatron_rl.preflight.recipe import check_recipe
from megatron_rl.rollout.engine import EngineError
from megatron_rl.rollout.generate import generate
from megatron_rl.rollout.sampling import Sampling, rollout_seed
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.trainer.step_metrics import conversation_metrics
from megatron_rl.weights.create import create_model
from tests.agents import talking
from tests.agents.simulated import SimulatedLoop, polling
from tests.agents.talks import TEXTS, Talks


@pytest.fixture
def talks(tmp_path: Path, words: Any) -> Talks:
    return Talks(tmp_path, words)


def test_what_is_trained_on_is_what_was_drawn_and_nothing_else(talks: Talks, words: Any) -> None:
    engine = talking.Arithmetic()
    drawn: dict[tuple[str, int], list[int]] = {}
    step = engine.step

    def noted() -> Any:
        ended = step()
        for completion in ended:
            drawn.setdefault(completion.request.name, []).extend(completion.ids)  # type: ignore[union-attr]
        return ended

    engine.step = noted  # type: ignore[method-assign]
    rollouts = talks("patient", engine=engine)
    for rollout in rollouts.held.values():
        assert rollout.response_ids.tolist() == drawn[rollout.sample_id, rollout.index]
        assert rollout.logprobs.tolist() == [np.float32(-1.0 / (1 + token)) for token in rollout.response_ids]
        spoken = [message["content"] for message in rollout.messages]
        whole = "".join(
            f"{role[0]}:{text}<eos>\n" for role, text in zip(["user", "assistant"] * 3, spoken, strict=True)
        )
        assert words.decode(rollout.tokens) == whole.removesuffix("\n")
        seed = rollout_seed(7, 5, rollout.sample_id, rollout.index) % 1000
        assert rollout.agent_rewards == {"reward": 6.0, "letters": len(str(spoken[-1])), "seed": seed}
        assert (rollout.text, rollout.failed_by) == (spoken[-1], None)
    seeds = {(request.name, request.seed) for request in engine.submitted}
    names = [(f"t/{prompt}", index) for prompt in range(3) for index in range(2)]
    assert seeds == {(name, rollout_seed(7, 5, *name, turn)) for name in names for turn in range(3)}


def test_latencies_do_not_change_a_bit(talks: Talks) -> None:
    quick = talking.bits(talks("patient"))
    for latency in range(1, 4):
        assert talking.bits(talks("patient", params={"latency": latency})) == quick, latency


def test_a_hundred_schedules_of_latencies_give_the_same_step(
    talks: Talks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents wait up to ten seconds after each turn, and a pass of the engine takes up to two, on a simulated clock."""
    quick = talks("patient", texts=TEXTS[:2])
    loop = SimulatedLoop()
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)
    config = talking.recipe("patient", params={"latency": 1, "longest": 10.0})
    prompts = talking.samples(tmp_path, config, talks.words, TEXTS[:2])
    orders, began = set[tuple[Any, ...]](), loop.now
    with talking.hosted(config, talks.words) as conversations:
        for schedule in range(100):
            monkeypatch.setattr(talking, "HURRY", schedule)
            engine, draw = talking.Arithmetic(), random.Random(schedule)
            step = engine.step
            engine.step = lambda draw=draw, step=step: (loop.advance(draw.uniform(0, 2)), step())[1]  # type: ignore[method-assign, misc]
            make = conversations.episodes(Sampling(1.0, 1.0, 60), 5, engine.version, None, engine.experts)
            rollouts = generate(engine, talking.dispatcher(), prompts, 2, make, poll=polling(loop, conversations.poll))
            assert talking.bits(rollouts) == talking.bits(quick), schedule
            assert rollouts.facts.tobytes() == quick.facts.tobytes()
            assert conversation_metrics(ALONE, rollouts) == conversation_metrics(ALONE, quick)
            orders.add(tuple((request.name, len(request.tokens)) for request in engine.submitted))
        assert not conversations.take_lost()
    assert len(orders) > 60, "they come in other orders"
    assert loop.now - began > 100 * 10


def test_a_conversation_does_not_depend_on_the_others_or_on_the_number_of_engines(talks: Talks, tmp_path: Path) -> None:
    together = talking.bits(talks("patient"))
    config = talking.recipe("patient")
    apart = []
    for prompt in talking.samples(tmp_path, config, talks.words, TEXTS):
        with talking.hosted(config, talks.words) as conversations:
            apart += talking.bits(talking.conversed(conversations, [prompt]))
    assert apart == together


@pytest.mark.parametrize("damaged", [False, True])
def test_all_ranks_of_an_engine_end_with_what_its_first_rank_heard(talks: Talks, tmp_path: Path, damaged: bool) -> None:
    alone = talking.bits(talks("patient"))
    config = talking.recipe("patient")
    prompts = talking.samples(tmp_path, config, talks.words, TEXTS)
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    digests, both = dict[int, bytes](), threading.Barrier(2)

    def rank_of(rank: int) -> Rollouts:
        def broadcast(item: Any) -> Any:
            if rank == 0:
                said.put(item)
            return item if rank == 0 else said.get(timeout=20)

        def gather(data: bytes) -> list[bytes]:
            digests[rank] = data
            both.wait(20)
            return [digests[0], digests[1]]

        group: Any = SimpleNamespace(index=0, rank=rank, size=2, count=1, is_leader=rank == 0, broadcast=broadcast)
        conversations = Conversations(config, group, talks.words)
        engine = talking.Arithmetic(most=5 if damaged and rank else 6)
        make = conversations.episodes(Sampling(1.0, 1.0, 60), 5, 3, None, engine.experts)
        try:
            return generate(engine, talking.dispatcher(group, gather), prompts, 2, make, poll=conversations.poll)
        finally:
            conversations.close()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(rank_of, 0), threads.submit(rank_of, 1)
        if damaged:
            with pytest.raises(EngineError, match="rank 1 of engine 0 has drawn other tokens than its first rank"):
                second.result()
            both.abort()  # the other waits for it
            return
        assert talking.bits(first.result()) == talking.bits(second.result()) == alone


def test_a_failure_is_begun_again_with_the_same_seeds_and_leaves_no_trace(talks: Talks) -> None:
    params = {"how": "raise", "first_only": True}
    engine = talking.Arithmetic()
    again = talks("failing", params=params, engine=engine)
    assert talking.bits(again) == talking.bits(talks("failing", params={"how": "raise", "of": "never"}))
    assert len(engine.submitted) == 12, "each conversation of one turn was held twice"
    assert not talks.lost


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "ConnectionError: the shop is closed"),
        ("exit", "the agent raised SystemExit"),
        ("fork", "BadRequestError: Error code: 400"),
        ("text", "the agent returned 'good', no number"),
    ],
)
def test_a_lost_conversation_has_no_tokens_and_no_rewards(talks: Talks, how: str, reason: str) -> None:
    rollouts = talks("failing", params={"how": how, "of": "something"})
    assert rollouts.lost.tolist() == [[False, False], [True, True], [False, False]]
    for rollout in (rollouts.held[2], rollouts.held[3]):
        assert (rollout.failed_by, rollout.length, rollout.agent_rewards) == ("infrastructure", 0, {})
        assert (rollout.version, rollout.num_tokens) == (3, len(rollout.prompt_ids))
    [(text, count)] = talks.lost.items()
    assert text.startswith("tasks.train.t: ")
    assert reason in text
    assert count == 2


@pytest.mark.parametrize(("how", "told"), [("limit", True), ("give up", False)])
def test_where_the_policy_breaks_off_its_turns_are_trained_on(talks: Talks, how: str, told: bool) -> None:
    rollouts = talks("failing", params={"how": how}, model_failed=-0.5, max_turns=2, texts=TEXTS[:1])
    for rollout in rollouts.held.values():
        assert (rollout.failed_by, dict(rollout.agent_rewards)) == ("model", {"*": -0.5})
        assert sum(segment.logprobs is not None for segment in rollout.segments) == (2 if told else 1)


def test_what_follows_the_prompt_is_never_longer_than_the_limit(talks: Talks) -> None:
    rollouts = talks("patient", tokens=45, turn_tokens=9, count=8)
    behind = rollouts.facts["num_tokens"] - rollouts.prompt_lengths
    assert behind.max() <= 45
    reasons = {rollout.failed_by for rollout in rollouts.held.values()}
    assert reasons == {None, "model"}, "some have come to their end"
    turns = [s for rollout in rollouts.held.values() for s in rollout.segments if s.logprobs is not None]
    assert max(len(turn.ids) for turn in turns) == 9
    cut = {rollout.finish_reason for rollout in rollouts.held.values() if rollout.failed_by}
    assert cut == {"length"}


def test_a_hanging_agent_costs_its_rollout_and_its_deadline_only(talks: Talks) -> None:
    began = time.monotonic()
    rollouts = talks("failing", params={"how": "hang", "of": "something"}, seconds=0.5)
    assert time.monotonic() - began < 5
    assert rollouts.lost.tolist() == [[False, False], [True, True], [False, False]]
    assert [*talks.lost] == ["tasks.train.t: no answer within 0.5 s (tasks.train.t.agent.seconds)"]


def test_the_time_of_the_engine_is_not_the_agents(talks: Talks) -> None:
    engine = talking.Arithmetic()
    step = engine.step
    engine.step = lambda: (time.sleep(0.05), step())[1]  # type: ignore[method-assign]
    assert not talks("patient", engine=engine, seconds=0.4, texts=TEXTS[:1]).lost.any()


def test_an_agent_that_blocks_ends_the_run_by_name(talks: Talks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "_BLOCKED", 0.4)
    monkeypatch.setattr(leader, "_WAIT", 0.1)
    with pytest.raises(AgentsFailed, match="the agent of rollout 0 of t/0 has blocked all others"):
        talks("failing", params={"how": "block"}, count=1, texts=TEXTS[:1])


def test_failures_in_a_row_end_the_run_by_name(talks: Talks) -> None:
    with pytest.raises(
        AgentsFailed, match=r"3 conversations in a row were lost \(tasks.train.t.agent.stop_after\)"
    ) as end:
        talks("failing", params={"how": "raise"}, stop_after=3)
    assert "after 2 attempts: ConnectionError: the shop is closed" in str(end.value)


def test_an_agent_without_a_verdict_leaves_it_to_other_rewards(talks: Talks) -> None:
    rollouts = talks("failing", params={"how": "none"}, texts=TEXTS[:1])
    assert [(r.failed_by, r.agent_rewards, r.length > 0) for r in rollouts.held.values()] == [(None, {}, True)] * 2


def test_what_the_recipe_does_not_say_is_refused_by_name(talks: Talks) -> None:
    talking.SAID.clear()
    rollouts = talks("fussy", count=1, texts=TEXTS[:1])
    assert rollouts.held[0].agent_rewards == {"reward": 2.0}, "max_tokens shortens a turn"
    names = ["n", "temperature", "top_p", "logprobs", "tool_choice", "tool_choice", "stop", "max_tokens", "message"]
    for name, text in zip(names, talking.SAID, strict=True):
        assert name in text
    assert talking.SAID[-1].startswith("forked: ")


def test_a_key_opens_its_own_conversation_only(talks: Talks) -> None:
    talking.SAID.clear()
    rollouts = talks("nosy", texts=TEXTS[:1])
    assert not rollouts.lost.any()
    assert len({*talking.SAID}) == 1, "nobody learns which conversations there are"


def listening() -> set[str]:
    return {str(each.laddr) for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"}


def test_a_strangers_program_talks_over_http_as_an_agent_does_without(talks: Talks) -> None:
    before, during = listening(), set()
    inside = talks("patient", texts=TEXTS[:1], count=1)
    assert listening() == before, "nothing listens that nobody asked for"
    engine = talking.Arithmetic()
    step = engine.step

    def looked() -> Any:
        during.update(listening() - before)
        return step()

    engine.step = looked  # type: ignore[method-assign]
    script = str(Path(__file__).with_name("script.py"))
    outside = talks("program", texts=TEXTS[:1], count=1, engine=engine, params={"script": script}, seconds=60)
    assert outside.held[0].agent_rewards == {"reward": 6.0}
    assert talking.bits(outside)[0][:4] == talking.bits(inside)[0][:4]
    assert ["127.0.0.1" in address for address in during] == [True]
    deadline = time.monotonic() + 5
    while listening() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert listening() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "agents" and thread.is_alive()]


def test_the_agents_of_the_page_converse(talks: Talks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    twice, program, shop, quiz = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, code in (("my_agent.py", twice), ("my_program.py", program), ("my_shop.py", shop), ("my_quiz.py", quiz)):
        (tmp_path / name).write_text(code)
    rollouts = talks(f"{tmp_path}/my_agent.py:twice", params={"question": "sure?"}, texts=TEXTS[:1])
    for rollout in rollouts.held.values():
        assert [message["role"] for message in rollout.messages] == ["user", "assistant", "user", "assistant"]
        assert rollout.messages[2]["content"] == "sure?"
        assert rollout.agent_rewards["reward"] == float("0" in str(rollout.messages[3]["content"]))
    script = str(Path(__file__).with_name("script.py"))
    outside = talks(
        f"{tmp_path}/my_program.py:program", params={"script": script}, texts=TEXTS[:1], count=1, seconds=60
    )
    assert outside.held[0].agent_rewards == {"reward": 0.0}
    sold = talks("tools", params={"environment": f"{tmp_path}/my_shop.py:Shop"}, parser="hermes", texts=TEXTS[:1])
    assert [rollout.agent_rewards for rollout in sold.held.values()] == [{"sold": 0.0}] * 2
    asked = talks(f"{tmp_path}/my_quiz.py:quiz", texts=TEXTS[:1])
    for rollout in asked.held.values():
        said = [str(message["content"]) for message in rollout.messages[1::2]]
        assert rollout.turn_rewards == {"right": tuple(float("0" in each) for each in said)}
        assert rollout.agent_rewards == {"right": sum("0" in each for each in said), "short": len(said[-1]) < 20}
    section, *_, credit = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    (tmp_path / "recipe.yaml").write_text(section)
    create_model(tmp_path / "model", CreateModelConfig(characters=talking.CHARACTERS), 1)
    (tmp_path / "model" / "chat_template.jinja").write_text(talking.TEMPLATE)
    overrides = [
        "run_dir=run",
        "model.path=model",
        "rollout.max_tokens=64",
        "rollout.max_prompt_tokens=64",
        "launch.processes=1",
    ]
    config = load_recipe(tmp_path / "recipe.yaml", overrides)
    check_recipe(config, "train", Machine())
    assert template_remarks_of_folder(config) == []
    stripping = talking.TEMPLATE.replace("m.content or ''", "(m.content or '').split('</think>')[-1]")
    (tmp_path / "model" / "chat_template.jinja").write_text(stripping)
    [said] = template_remarks_of_folder(config)
    assert said.startswith("tasks.train.sums: by the chat template, the thinking of earlier turns is left out")
    assert "conversations go on with what the model saw" in said
    config.tasks.train["sums"].agent.history = "rendered"  # type: ignore[union-attr]
    [said] = template_remarks_of_folder(config)
    assert said.endswith("; the next turn begins a sequence there")
    config.tasks.train["sums"].agent.history = "kept"  # type: ignore[union-attr]
    refused = {
        "algorithm.gamma=0.5": "while `algorithm.credit` is rollout",
        "tasks.train.sums.chat=false": "set tasks.train.sums.chat=true",
        "tasks.train.sums.agent.name=nobody": "unknown agent 'nobody'",
        "tasks.train.sums.agent.params={quest: 1}": "did you mean 'question'",
        "tasks.train.sums.agent.params={question: 1}": "`question` must be text",
        "tasks.train.sums.agent.seconds=1e5": "must be less than the watchdog's",
        "tasks.train.sums.agent=null": "no agent converses about the prompts of task 'sums'",
        "tasks.train.sums.agent.max_turn=1": "did you mean `tasks.train.sums.agent.max_turns`",
    }
    (tmp_path / "credit.yaml").write_text(credit)
    dense = "def make():\n    def reward(completion, sample):\n        return [0.0]\n    reward.per_token = True\n"
    (tmp_path / "dense.py").write_text(f"{dense}    return reward\n")
    check_recipe(load_recipe(tmp_path / "credit.yaml", overrides), "train", Machine())
    refused_by_turn = {
        "algorithm.estimator.name=remax": "'remax' compares with a greedy rollout",
        "algorithm.estimator={name: awpo, params: {reasoning: short}}": "'awpo' remembers a statistic of whole rollouts",
        "algorithm.gamma=0": "algorithm.gamma",
        "tasks.train.sums.agent.sequences=2": "those of several sequences have no common order",
        "tasks.train.sums.agent={name: tools, params: {environment: mcp, environment_params: {command: [sh]}}}": "no rewards",
        "tasks.train.sums.agent=null": "no training task has an agent",
        "rewards={right: null, short: null, all: {reward: length, params: {limit: 3}}}": "none of `rewards` reads it",
        "rewards.right.condition={column: short, at_least: 1}": "rewards.right.condition is for a number per rollout",
        "rewards.dense={reward: 'dense.py:make'}": "rewards.dense has a number per token",
    }
    for file, changes in (("recipe.yaml", refused), ("credit.yaml", refused_by_turn)):
        for override, words in changes.items():
            with pytest.raises(ConfigError) as refusal:
                check_recipe(load_recipe(tmp_path / file, [*overrides, override]), "train", Machine())
            assert words in str(refusal.value)


def test_a_request_that_does_not_say_its_length_is_bounded() -> None:
    session = cast(Any, SimpleNamespace(api_key="key"))
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(64):
            read += 1
            yield b" " * 2**20

    async def post() -> httpx2.Response:
        transport = httpx2.ASGITransport(endpoint.make_app(lambda name: session))
        async with httpx2.AsyncClient(transport=transport, headers={"authorization": "Bearer key"}) as client:
            return await client.post("http://engine/sessions/1/v1/chat/completions", content=body())

    answer = asyncio.run(post())
    assert (answer.status_code, answer.json()["error"]["code"], read) == (413, "too_large", 33)
