"""Guests: programs in environments of their own that play a part of conversations."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.agents import guest, gyms
from megatron_rl.agents.failures import AgentsFailed
from megatron_rl.agents.guest import the_guest
from megatron_rl.agents.registry import make_agent
from tests.agents import talking

PROGRAM = str(Path(__file__).with_name("guest_program.py"))
ENVIRONMENT = {"taskset": {"id": "some"}}


def played(how: str, pids: str) -> Any:
    """An agent that asks the policy once, and leaves the rest to a guest."""

    async def run(model: Any, task: Any) -> Any:
        await talking.turns(model, task, 1)
        one = await the_guest((sys.executable, PROGRAM), {"how": how, "pids": pids})
        return await one.ask({"base_url": task.base_url})

    return run


def rolled_out(folder: Path, how: str, **keys: Any) -> tuple[Any, Any, list[int]]:
    """Two conversations with such a guest: the rollouts, what was lost, and the processes that there were."""
    pids = folder / "pids"
    pids.touch()
    words = talking.tokenizer(folder)
    config = talking.recipe("", **{"params": {"how": how, "pids": str(pids)}, **keys})
    assert config.tasks.train["t"].agent is not None
    config.tasks.train["t"].agent.name = f"{__name__}:played"
    prompts = talking.samples(folder, config, words, ["hello?"])
    try:
        with talking.hosted(config, words) as conversations:
            rollouts = talking.conversed(conversations, prompts)
            return rollouts, conversations.take_lost(), [*map(int, pids.read_text().split())]
    finally:
        folder.joinpath("closed").touch()


def wait_until(true: Callable[[], bool], seconds: float = 15.0) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_all_conversations_share_a_guest_which_ends_with_them(tmp_path: Path) -> None:
    rollouts, lost, pids = rolled_out(tmp_path, "child")
    for rollout in rollouts.held.values():
        assert rollout.failed_by is None
        assert rollout.agent_rewards["reward"] == 1.0
        assert math.isnan(rollout.agent_rewards["nothing"])
    assert not lost
    assert len(pids) == 3  # one guest, and the child of each request
    assert wait_until(lambda: not any(map(lives, pids)))


def test_a_guest_that_dies_is_started_again_and_its_conversations_are_begun_again(tmp_path: Path) -> None:
    rollouts, lost, pids = rolled_out(tmp_path, "die once")
    assert [rollout.failed_by for rollout in rollouts.held.values()] == [None, None]
    assert not lost
    assert len(pids) == 2


def test_one_that_always_dies_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(AgentsFailed, match=r"guest_program.py ended \(code 9\)(.|\n)*out of memory"):
        rolled_out(tmp_path, "die", stop_after=2)


def test_one_that_cannot_begin_says_why(tmp_path: Path) -> None:
    with pytest.raises(AgentsFailed, match=r"ended \(code 1\)(.|\n)*no such taskset"):
        rolled_out(tmp_path, "never ready", stop_after=2)


def test_what_a_guest_raises_is_the_infrastructures(tmp_path: Path) -> None:
    rollouts, lost, _ = rolled_out(tmp_path, "raise")
    assert [rollout.failed_by for rollout in rollouts.held.values()] == ["infrastructure"] * 2
    assert "guest_program.py: ValueError: no task" in next(iter(lost))


def test_a_request_that_is_not_waited_for_is_cancelled(tmp_path: Path) -> None:
    rollouts, lost, _ = rolled_out(tmp_path, "hang", seconds=3.0)
    assert [rollout.failed_by for rollout in rollouts.held.values()] == ["infrastructure"] * 2
    assert "no answer within 3 s" in next(iter(lost))
    assert wait_until(lambda: (tmp_path / "pids.cancelled").exists())


@pytest.mark.parametrize("how", ["child", "block"])
def test_a_guest_does_not_outlive_a_run_that_is_killed(tmp_path: Path, how: str) -> None:
    script = textwrap.dedent(f"""
        import asyncio, sys
        from megatron_rl.agents.guest import the_guest
        async def main():
            guest = await the_guest((sys.executable, {PROGRAM!r}), {{"how": {how!r}, "pids": {str(tmp_path / "pids")!r}}})
            asyncio.create_task(guest.ask({{}}))
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    run = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    pids, asked = tmp_path / "pids", tmp_path / "pids.asked"
    count = 2 if how == "child" else 1
    assert wait_until(lambda: asked.exists() and len(pids.read_text().split()) == count, 60)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert wait_until(lambda: not any(lives(int(pid)) for pid in pids.read_text().split()))


def test_a_guest_inherits_what_is_the_users_and_nothing_of_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "PYTHONHASHSEED", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "OF_A_USER"):
        monkeypatch.setenv(name, "0")
    rollouts, _, _ = rolled_out(tmp_path, "inherit")
    assert {*rollouts.held[0].agent_rewards} == {"CUDA_VISIBLE_DEVICES", "OF_A_USER"}


def test_an_environment_that_has_not_been_made_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guest, "ENVIRONMENTS", tmp_path)
    for name, params in (("verifiers", {"environment": ENVIRONMENT}), ("nemo_gym", {"config_paths": ["a.yaml"]})):
        with pytest.raises(ValueError, match=f"^{name}: its environment .* has not been made; run `make agents-setup`"):
            make_agent(name, **params)


def test_a_gym_gives_one_number_per_conversation_which_credit_by_turn_refuses() -> None:
    for name, params in (("verifiers", {"environment": ENVIRONMENT}), ("nemo_gym", {"config_paths": ["a.yaml"]})):
        assert not make_agent(name, **params).rewards_turns


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("verifiers", {"environment": {}}, "environment has no taskset.id"),
        ("verifiers", {"environment": ENVIRONMENT, "path": "nowhere"}, "path is no folder: nowhere"),
        ("nemo_gym", {"config_paths": []}, "config_paths is empty"),
        ("nemo_gym", {}, "the parameter 'config_paths' is missing"),
    ],
)
def test_parameters_that_cannot_be_are_refused(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{words}"):
        make_agent(name, **params)


def test_a_prompt_of_another_source_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gyms, "interpreter", lambda name: Path(sys.executable))
    words = talking.tokenizer(tmp_path)
    config = talking.recipe("tools", params={"environment": ENVIRONMENT}, stop_after=2)
    assert config.tasks.train["t"].agent is not None
    config.tasks.train["t"].agent.name = "verifiers"
    prompts = talking.samples(tmp_path, config, words, ["hello?"])
    with talking.hosted(config, words) as conversations, pytest.raises(AgentsFailed, match=r"run_verifiers\.py export"):
        talking.conversed(conversations, prompts)
