"""The environment `python`, and the generated task for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_rl.agents import python_tool
from megatron_rl.agents.environments import environment_maker
from megatron_rl.agents.failures import InfrastructureFailed
from megatron_rl.agents.python_tool import PythonTool
from megatron_rl.config import load_recipe
from megatron_rl.config.schema import TaskConfig, TasksConfig
from megatron_rl.rewards.sandbox import SandboxError
from megatron_rl.tasks import check_tasks
from megatron_rl.tasks.demonstrations import make_writer
from megatron_rl.tasks.loading import load_task
from megatron_rl.tasks.sources import items_of
from megatron_rl.weights.create import write_tokenizer
from tests.agents.test_tool_loop import conversed, scripts

RECIPE = Path(__file__).parents[2] / "recipes" / "cpu" / "python_maths.yaml"


def replies(*calls: Any, seed: int = 0, **params: Any) -> tuple[list[str], dict[str, float]]:
    async def run() -> tuple[list[str], dict[str, float]]:
        tool = PythonTool(**params)
        tool.reset({"seed": seed})
        made = [await tool.call("python", call if isinstance(call, dict) else {"code": call}) for call in calls]
        return made, tool.reward({}, [])

    return asyncio.run(run())


def test_a_reply_is_what_is_printed_and_the_value_of_the_last_line() -> None:
    said, reward = replies(
        "a = 6\nprint(a)\na * 7",
        "x = 1",
        "None",
        "1 / 0",
        "def f(x):\n    return g(x)\n\nf(3)",
        "x = (",
        "import sys\nprint('end')\nsys.exit(3)",
        {"program": "1"},
        "print({'a', 'b', 'c', 'd'}, [*map(hash, 'ab')])",
        "print({'a', 'b', 'c', 'd'}, [*map(hash, 'ab')])",
    )
    assert said[:8] == [
        "6\n42",
        "nothing was printed",
        "nothing was printed",
        "ZeroDivisionError: division by zero (line 1)",
        "NameError: name 'g' is not defined (line 2)",
        "SyntaxError: '(' was never closed (line 1)",
        "end",
        "error: the tool is python, with code",
    ]
    assert said[8] == said[9]  # hashes of text are no accident
    assert reward == {"ran": 0.9}


def test_names_live_on_where_state_is_kept() -> None:
    calls = ("a = 2; print('loud')", "b = a + undefined", "a + 1", "import random\nrandom.random()")
    kept, _ = replies(*calls, state="kept", seed=5)
    assert kept[2] == "3"
    fresh, _ = replies(*calls)
    assert fresh[2].startswith("NameError")
    again, _ = replies(*calls, state="kept", seed=5)
    other, _ = replies(*calls, state="kept", seed=6)
    assert again == kept  # random numbers are the rollout's
    assert other[3] != kept[3]


def test_limits_hold_and_a_program_that_hits_one_leaves_nothing() -> None:
    said, reward = replies(
        "a = 1\nwhile True: pass", "'x' * 10**9", "print('x' * 10**7)", "a", state="kept", cpu_seconds=1, memory_mib=256
    )
    assert said[0] == "error: it took more than 1 s"
    assert said[1] == "MemoryError (line 1)"
    assert "File too large" in said[2]
    assert said[3].startswith("NameError: name 'a' is not defined")
    assert reward == {"ran": 0.5}


def test_programs_reach_neither_the_network_nor_files_nor_other_programs() -> None:
    said, _ = replies(
        "import socket\nsocket.create_connection(('127.0.0.1', 80))",
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "import os\nos.fork()",
        "import megatron_rl",
    )
    for reply, error in zip(said, ["PermissionError"] * 4 + ["ModuleNotFoundError"], strict=True):
        assert reply.startswith(error), reply


def test_a_machine_without_a_sandbox_is_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SandboxError("no Landlock")

    monkeypatch.setattr(python_tool, "run_program", refuse)
    with pytest.raises(InfrastructureFailed, match="no Landlock"):
        replies("1")


@pytest.mark.parametrize(
    ("params", "message"),
    [({"state": "old"}, "state"), ({"cpu_seconds": 0}, "cpu_seconds"), ({"memory": 1}, "did you mean 'memory_mib'")],
)
def test_it_is_refused_before_the_run(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment_maker("python", params)


def test_a_demonstrated_conversation_is_the_one_that_is_had(tmp_path: Path) -> None:
    """With the program's reply, and the answer; a guess has the answer's length."""
    config = load_recipe(RECIPE)
    assert config.model.create is not None
    write_tokenizer(tmp_path, config.model.create)
    words = AutoTokenizer.from_pretrained(str(tmp_path))
    task = config.tasks.train["maths"]
    task.size, task.exclude = 12, []
    prompts = [*{sample.prompt: sample for sample in load_task("maths", task, words)}.values()]
    rollouts = conversed(config, words, prompts, scripts(prompts))
    called = 0
    for row, sample in enumerate(prompts):
        assert isinstance(sample.demonstration, list)
        rollout = rollouts.held[row]
        assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == [
            message["content"] for message in sample.demonstration if message["role"] == "tool"
        ]
        calls = len(sample.demonstration) > 1
        assert rollout.agent_rewards == {"ran": float(calls)}
        assert (rollout.last_turn == sample.answer) == calls
        assert len(rollout.last_turn) == len(str(sample.answer))
        called += calls
    assert 0 < called < len(prompts)


def test_a_problem_s_words_are_its_program() -> None:
    task = TaskConfig("python_maths", size=200, params={"max_names": 3, "max_terms": 4, "digits": 3})
    items = [*items_of(task)]
    assert items == [*items_of(task)]
    assert items[:5] != [*items_of(TaskConfig("python_maths", size=5, params=task.params, seed=2))]
    operators = {"times": "*", "plus": "+", "minus": "-", "mod": "%"}
    for item in items:
        assert isinstance(item.prompt, str)
        program = (
            item.prompt.replace("what is ", "").replace(". ", ";").replace(" is ", "=").replace(" ", "").strip("?")
        )
        for word, sign in operators.items():
            program = program.replace(word, sign)
        [call] = item.tool_calls or ()
        assert call["parameters"]["code"] == program
    shown = " ".join(str(item.prompt) for item in items)
    assert all(word in shown for word in operators)
    programs = [str((item.tool_calls or [])[0]["parameters"]["code"]) for item in items[:8]]
    assert replies(*programs)[0] == [item.answer for item in items[:8]]


@pytest.mark.parametrize("params", [{"digits": 0}, {"max_names": 0}, {"max_terms": 1}, {"min_name": 1}])
def test_params_out_of_range_are_refused(params: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        check_tasks(TasksConfig(train={"t": TaskConfig(source="python_maths", size=1, params=params)}))


def test_the_writer_is_for_its_source() -> None:
    with pytest.raises(ValueError, match="for the source python_maths only"):
        make_writer("python_maths", {})("t/0", {"source_dataset": "tool_house"})
