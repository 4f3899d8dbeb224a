"""The agent `gymnasium`: walks in threads, in processes and at a server of OpenEnv's protocol, which fail and are late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, WSMsgType, web

from megatron_rl.agents.registry import make_agent
from megatron_rl.config.schema import AgentConfig, Config, TaskConfig, TasksConfig
from megatron_rl.data.rollout import Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.runtime.calls import event_loop
from megatron_rl.tasks import check_tasks
from megatron_rl.tasks.loading import load_task
from megatron_rl.tasks.openenv import Served
from megatron_rl.tasks.reset_step import EnvironmentParams, game_maker
from tests.agents import talking
from tests.agents.test_tool_loop import Scripted
from tests.agents.walking import Walk

WALK = f"{Path(__file__).with_name('walking.py')}:Walk"
WHERE: dict[str, dict[str, Any]] = {
    "threads": {"environment": WALK},
    "processes": {"environment": WALK, "python": sys.executable},
}


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, Any]]:
    """A server that speaks OpenEnv's protocol about walks. What environments get is told to `reset`, as with any server."""

    async def episode(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        walk: Any = None
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                break
            asked = json.loads(message.data)
            if asked["type"] == "close":
                break
            if asked["type"] == "reset":
                seed = asked["data"].pop("seed")
                walk = Walk(**asked["data"])
                observation, reward, done = walk.reset(seed=seed)[0], None, False
            else:
                try:
                    said = await asyncio.to_thread(walk.step, asked["data"]["say"])
                    observation, reward, done = said[0], said[1], said[2] or said[3]
                except KeyError as error:
                    data = {"message": str(error), "code": "EXECUTION_ERROR"}
                    await socket.send_str(json.dumps({"type": "error", "data": data}))
                    continue
            data = {"observation": {"text": observation, "metadata": {}}, "reward": reward, "done": done}
            await socket.send_str(json.dumps({"type": "observation", "data": data}))
        return socket

    loop, ready = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []
    runners: list[web.AppRunner] = []

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/ws", episode)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        ports.append(site._server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]
        ready.set()

    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(serve(), loop)
    assert ready.wait(10)
    yield {"url": f"http://127.0.0.1:{ports[0]}", "action": "say", "observation": "text"}
    asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)


def params(where: str, server: dict[str, Any], seconds: float = 20.0, **walk: Any) -> dict[str, Any]:
    if where == "served":
        return {"environment": "openenv", "environment_params": {**server, "reset": walk}, "step_seconds": seconds}
    return {**WHERE[where], "environment_params": walk, "step_seconds": seconds}


def walks(
    words: Any, params: Mapping[str, Any], size: int = 3, of_agent: Mapping[str, Any] | None = None, **agent: Any
) -> tuple[list[Sample], Config]:
    section = AgentConfig(
        "gymnasium", **{"params": {**params, **(of_agent or {})}, "max_turns": 4, "seconds": 20.0, **agent}
    )
    task = TaskConfig(source="gymnasium", params=dict(params), size=size, seed=4, chat=True, agent=section)
    config = Config(run_dir="", seed=7, tasks=TasksConfig(train={"t": task}))
    check_tasks(config.tasks)
    return load_task("t", task, words), config


def walked(words: Any, prompts: list[Sample], config: Config, lost: int = 0, **more: Any) -> Rollouts:
    with talking.hosted(config, words) as conversations:
        rollouts = talking.conversed(conversations, prompts, 2, **more)
        assert sum(conversations.take_lost().values()) == lost
        return rollouts


@pytest.mark.parametrize("where", ["threads", "processes", "served"])
def test_a_walk_is_the_same_wherever_it_is_and_however_long_it_takes(
    where: str, words: Any, server: dict[str, Any]
) -> None:
    prompts, config = walks(words, params("threads", server))
    expected = walked(words, prompts, config)
    for rollout in expected.held.values():
        walk, earned, total = Walk(), list[float](), 0.0
        [seed] = [sample.metadata["seed"] for sample in prompts if sample.id == rollout.sample_id]
        observation, ended = walk.reset(seed=seed)[0], False
        for said, answer in zip(rollout.messages[::2], rollout.messages[1::2], strict=True):
            assert not ended
            assert said == {"role": "user", "content": observation}
            observation, reward, terminated, truncated, _ = walk.step(answer["content"])
            total, ended = total + reward, terminated or truncated
            earned.append(reward)
        assert ended
        assert rollout.agent_rewards == {"reward": total}
        assert rollout.turn_rewards == {"reward": tuple(earned)}
    assert len({len(rollout.messages) for rollout in expected.held.values()}) > 1
    for latency in (0.0, 0.02):
        prompts, config = walks(words, params(where, server, latency=latency))
        assert talking.bits(walked(words, prompts, config)) == talking.bits(expected)


@pytest.mark.parametrize(
    ("where", "how", "says"),
    [
        ("threads", "raise", "EnvironmentFailed: step: KeyError: 'the map'"),
        ("threads", "nonsense", "step returned 'at 0.', must be"),
        ("threads", "hang", "step: no answer within 0.5 s"),
        ("processes", "raise", "step: KeyError: 'the map'"),
        ("processes", "nonsense", "step returned 'at 0.', must be"),
        ("processes", "hang", "step: no answer within 0.5 s"),
        ("processes", "die", "step: its process ended with code 3"),
        ("served", "raise", "answered: 'the map'"),
        ("served", "hang", "step: no answer within 0.5 s"),
    ],
)
def test_a_walk_that_fails_is_lost_and_no_other(
    where: str, how: str, says: str, words: Any, server: dict[str, Any]
) -> None:
    prompts, config = walks(words, params("threads", server, steps=9))
    expected = walked(words, prompts, config)
    failing = params(where, server, 0.5 if how == "hang" else 20.0, steps=9, how=how)
    prompts, config = walks(words, failing)
    begin = time.monotonic()
    with talking.hosted(config, words) as conversations:
        rollouts = talking.conversed(conversations, prompts, 2)
        lost = conversations.take_lost()
    assert time.monotonic() - begin < 15
    fails = {sample.id for sample in prompts if int(str(sample.metadata["seed"])) % 3 == 0}
    assert 0 < len(fails) < len(prompts)
    for row, rollout in rollouts.held.items():
        long_enough = len(expected.held[row].messages) > 2  # to come to its second step
        if rollout.sample_id in fails and long_enough:
            assert rollout.failed_by == "infrastructure"
        else:
            assert talking.one(rollout) == talking.one(expected.held[row])
    assert sum(lost.values()) >= 1
    assert all(says in reason for reason in lost), lost


@pytest.mark.parametrize("how", ["print", "flood"])
def test_what_a_walk_prints_is_nobody_s_business(how: str, words: Any, server: dict[str, Any]) -> None:
    prompts, config = walks(words, params("threads", server))
    expected = walked(words, prompts, config)
    prompts, config = walks(words, params("processes", server, how=how))
    assert talking.bits(walked(words, prompts, config)) == talking.bits(expected)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("It is 3.", "answered: It is 3."),
        ("[" * 100_000, "answered: [[["),
        ('{"type": "observation"}', 'answered: {"type": "observation"}'),
        ('{"type": "observation", "data": {"reward": 1}}', 'answered: {"type": "observation", "data": {"reward": 1}}'),
        ('{"type": "error", "data": {"message": "busy"}}', "answered: busy"),
        ('{"type": "observation", "data": {"observation": "at 0"}}', "no field 'text': it is 'at 0'"),
        ('{"type": "observation", "data": {"observation": {"x": 1}}}', "no field 'text': it has x"),
        ('{"type": "observation", "data": {"observation": {"text": ""}, "reward": [1]}}', "a step's reward is [1]"),
    ],
    ids=range(8),
)
def test_an_odd_reply_of_a_server_is_quoted(reply: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        asyncio.run(first_reply(reply))


def test_a_server_that_has_gone_away_leaves_no_session_open() -> None:
    reply = '{"type": "observation", "data": {"observation": {"text": "at 0"}}}'
    assert asyncio.run(first_reply(reply, goes_away=True)).closed


async def first_reply(reply: str, goes_away: bool = False) -> ClientSession:
    """Asks a server that says this to `reset`, and returns the session after `close`."""

    async def episode(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_str(reply)
        if goes_away and request.transport is not None:
            request.transport.abort()
        await socket.receive()
        return socket

    app = web.Application()
    app.router.add_get("/ws", episode)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served = Served(f"http://127.0.0.1:{runner.addresses[0][1]}", observation="text")
    try:
        assert await served.reset(1) == "at 0"
    finally:
        assert served._session is not None
        await asyncio.sleep(0.2 if goes_away else 0.0)
        with contextlib.suppress(OSError):
            await served.close()
        await runner.cleanup()
    return served._session


def test_a_process_inherits_what_is_the_users_and_nothing_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHASHSEED", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "OF_A_USER"):
        monkeypatch.setenv(name, "0")
    game = game_maker(EnvironmentParams(WALK.replace("Walk", "Surroundings"), python=sys.executable))()
    observed = asyncio.run_coroutine_threadsafe(game.reset(0), event_loop()).result()
    assert observed == "CUDA_VISIBLE_DEVICES OF_A_USER"
    asyncio.run_coroutine_threadsafe(game.close(), event_loop()).result()


def test_limits_truncate_and_what_was_earned_counts(words: Any, server: dict[str, Any]) -> None:
    prompts, config = walks(words, params("threads", server, steps=50), max_turns=2)
    whole = walked(words, prompts, config)
    short = walked(words, prompts, config, tokens=12)
    assert {rollout.failed_by for rollout in [*whole.held.values(), *short.held.values()]} == {None}
    assert max(len(rollout.messages) for rollout in whole.held.values()) == 4  # of up to 100
    for rollout in [*whole.held.values(), *short.held.values()]:
        walk = Walk(50)
        [seed] = [sample.metadata["seed"] for sample in prompts if sample.id == rollout.sample_id]
        walk.reset(seed=seed)
        earned = sum(walk.step(answer["content"])[1] for answer in rollout.messages[1::2])
        assert rollout.agent_rewards == {"reward": earned}


@pytest.mark.parametrize(
    ("action", "turns", "heard"),
    [
        (None, ["go up", "no."], ["go up", "no."]),
        ("do ([a-z ]+)[.]", ["do up. no, do left. do right", "do down.", "hm"], ["left", "down"]),
        ("up|down", ["down? up? no", "?"], ["up"]),
    ],
)
def test_an_action_is_what_the_expression_matches_last(
    action: str | None, turns: list[str], heard: list[str], words: Any
) -> None:
    prompts, config = walks(words, {"environment": WALK.replace("Walk", "Echo")}, 1, {"action": action})
    say = Scripted(words, lambda so_far: turns[so_far.count("<eos>") // 2])
    rollout = walked(words, prompts, config, engine=say).held[0]
    assert [m["content"] for m in rollout.messages if str(m["content"]).startswith("heard")] == [f"heard {heard[0]}"]
    assert rollout.failed_by == (None if len(heard) == 2 else "model")
    assert rollout.agent_rewards == ({"reward": 2.0} if len(heard) == 2 else {"*": 0.0})


def test_a_prompt_without_the_observation_or_its_seed_is_an_error_that_says_so(words: Any, tmp_path: Path) -> None:
    for row, says in (
        ({"prompt": "look", "seed": 2}, "reset observes 'at"),
        ({"prompt": "go on", "seed": "two"}, "the prompt has the seed 'two', no whole number"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        task = TaskConfig(source="jsonl", path=str(tmp_path / "rows.jsonl"), chat=True)
        task.agent = AgentConfig("gymnasium", {"environment": WALK})
        config = Config(run_dir="", seed=7, tasks=TasksConfig(train={"t": task}))
        with talking.hosted(config, words) as conversations:
            talking.conversed(conversations, load_task("t", task, words), 1)
            [lost] = conversations.take_lost()
        assert says in lost


def test_an_observation_that_floods_is_cut(words: Any) -> None:
    prompts, config = walks(words, {"environment": WALK.replace("Walk", "Echo")}, 1, {"longest_observation": 8})
    rollout = walked(words, prompts, config, engine=Scripted(words, lambda so_far: "go up")).held[0]
    assert rollout.messages[2]["content"] == "heard go ... 3 more characters"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "the parameter 'environment' is missing"),
        ({"environment": "walk"}, "neither 'openenv' nor written file.py:factory"),
        ({"environment": WALK, "environment_params": {"step": 3}}, "did you mean 'steps'"),
        ({"environment": WALK, "environment_params": {"steps": 0}}, "steps must be at least 1"),
        ({"environment": "fractions:Fraction"}, "has no method 'reset'"),
        ({"environment": WALK, "python": "/bin/none"}, "python: '/bin/none' is no program"),
        ({"environment": "nowhere.py:Walk", "python": sys.executable}, "there is no file nowhere.py"),
        ({"environment": "openenv"}, "the parameter 'url' is missing"),
        ({"environment": "openenv", "environment_params": {"url": "localhost"}}, "begins with none of http"),
        ({"environment": "openenv", "environment_params": {"url": "http://x"}, "python": "p"}, "no effect on a server"),
        ({"environment": WALK, "step_seconds": 0}, "step_seconds"),
    ],
)
def test_an_environment_is_refused_before_the_run(params: dict[str, Any], message: str) -> None:
    task = TaskConfig(source="gymnasium", params=params, size=1, chat=True)
    with pytest.raises(ValueError, match=message):
        check_tasks(TasksConfig(train={"t": task}))
    with pytest.raises(ValueError, match=message):
        make_agent("gymnasium", **params)


def test_an_expression_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"action: '\(' is no regular expression"):
        make_agent("gymnasium", environment=WALK, action="(")
