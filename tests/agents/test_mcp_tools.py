"""The environment `mcp`: the tools of a small server, over pipes and over HTTP, which hangs, dies, floods and babbles."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from transformers import AutoTokenizer

from megatron_rl.agents.environments import environment_maker
from megatron_rl.agents.failures import InfrastructureFailed
from megatron_rl.agents.mcp_tools import McpTools
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.schema import AgentConfig, Config, TaskConfig, TasksConfig
from megatron_rl.data.rollout import Rollouts
from megatron_rl.tasks import check_tasks
from megatron_rl.tasks.demonstrations import hermes_call
from megatron_rl.tasks.loading import load_task
from megatron_rl.weights.create import write_tokenizer
from tests.agents import mcp_server, talking
from tests.agents.test_tool_loop import Scripted

SERVER = [sys.executable, str(Path(mcp_server.__file__))]
CHARACTERS = talking.CHARACTERS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ<>_{}[]\"'/;-#&|^()"
WORDS = [f"{name} " for name in mcp_server.TOOLS]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder, CreateModelConfig(characters=CHARACTERS, vocab_size=256))
    (folder / "chat_template.jinja").write_text(talking.TEMPLATE)
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def tools() -> list[dict[str, Any]]:
    """Those of the server, as a recipe has them."""
    command = [sys.executable, "-m", "megatron_rl.agents.mcp_client", *SERVER]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    listed: list[dict[str, Any]] = yaml.safe_load(printed)["tools"]
    return listed


def test_a_server_whose_tools_cannot_be_listed_is_named() -> None:
    for command, says in (
        ([], "say which server"),
        (["none-such"], "'none-such'"),
        (["/bin/true"], "server /bin/true"),
    ):
        listing = [sys.executable, "-m", "megatron_rl.agents.mcp_client", *command]
        done = subprocess.run(listing, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def conversed(
    words: Any, tools: list[dict[str, Any]], params: dict[str, Any], says: dict[str, list[str]], **agent: Any
) -> tuple[Rollouts, list[str]]:
    """One conversation for each prompt, in which the policy makes the calls after it; and what was lost."""
    section = AgentConfig("tools", parser="hermes", max_turns=8, seconds=60.0, model_failed=-2.0)
    section.params = {"environment": "mcp", "environment_params": params, "longest_reply": 40, **agent}
    task = TaskConfig(source=f"{__file__}:rows", params={"prompts": [*says]}, size=len(says), chat=True, tools=tools)
    task.agent = section
    config = Config(run_dir="", seed=7, tasks=TasksConfig(train={"t": task}))
    check_tasks(config.tasks)

    def say(so_far: str) -> str:
        prompt = so_far.partition(":")[2].partition("<eos>")[0]
        made = so_far.count("\na:") - 1
        calls = says[prompt]
        return hermes_call({"name": calls[made], "parameters": {"a": made}}) if made < len(calls) else "done"

    with talking.hosted(config, words) as conversations:
        prompts = load_task("t", task, words)
        rollouts = talking.conversed(conversations, prompts, 1, Scripted(words, say), 2000)
        return rollouts, [*conversations.take_lost()]


def rows(seed: int, prompts: list[str]) -> Iterator[dict[str, Any]]:
    yield from ({"prompt": prompt} for prompt in prompts)


def replies(rollouts: Rollouts, row: int = 0) -> list[str]:
    return [str(message["content"]) for message in rollouts.held[row].messages if message["role"] == "tool"]


def test_results_and_errors_are_replies(words: Any, tools: list[dict[str, Any]]) -> None:
    assert [tool["function"]["name"] for tool in tools] == [*mcp_server.TOOLS]  # of two pages
    assert tools[0]["function"] == {"name": "add", "description": "to add", "parameters": mcp_server.SCHEMA}
    for how in ("", "chatty"):
        calls = ["add", "add", "complain", "missing", "fly", "count"]
        rollouts, lost = conversed(words, tools, {"command": [*SERVER, how]}, {"go": calls})
        assert not lost
        assert replies(rollouts) == [
            "1\n.",
            "2\n.",
            "error: no paint left\n.",
            "error: unknown tools/call",
            "error: the tools are add, count, complai ... 28 more characters",
            "4\n.",
        ]
        assert rollouts.held[0].agent_rewards == {}


def test_a_server_belongs_to_a_conversation_unless_it_is_shared(words: Any, tools: list[dict[str, Any]]) -> None:
    says = {"one": ["count"], "two": ["count"], "six": ["count"]}
    own, _ = conversed(words, tools, {"command": SERVER}, says)
    assert [replies(own, row) for row in own.held] == [["1\n."]] * 3
    shared, _ = conversed(words, tools, {"command": SERVER, "shared": True}, says)
    assert sorted(replies(shared, row)[0] for row in shared.held) == ["1\n.", "2\n.", "3\n."]


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_that_fails_costs_its_conversations_and_no_other(
    shared: bool, words: Any, tools: list[dict[str, Any]]
) -> None:
    says = {"up": ["add", "die"], "on": ["add", "hang"], "no": ["add", "flood"], "in": ["add", "add"]}
    begin = time.monotonic()
    rollouts, lost = conversed(words, tools, {"command": SERVER, "shared": shared}, says, tool_seconds=4.0)
    assert time.monotonic() - begin < 45
    if shared:
        return
    assert [rollouts.held[row].failed_by for row in range(4)] == ["infrastructure", "model", "infrastructure", None]
    assert rollouts.held[1].agent_rewards == {"*": -2.0}
    assert replies(rollouts, 3) == ["1\n.", "2\n."]
    assert sorted(reason.partition("mcp_server.py ")[2] for reason in lost) == [
        "ended in a call of die",
        "ended in a call of flood",
    ]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("dead", "cannot be talked to: MCPError"),
        ("garbage", "cannot be talked to: MCPError"),
        ("flood", "cannot be talked to: MCPError"),
        ("line", "cannot be talked to: MCPError"),
        ("silent", "mcp took more than 2 s to begin"),
    ],
)
def test_a_server_that_never_speaks_the_protocol_is_lost(
    how: str, says: str, words: Any, tools: list[dict[str, Any]]
) -> None:
    seconds = 2.0 if how == "silent" else 30.0
    rollouts, lost = conversed(words, tools, {"command": [*SERVER, how]}, {"go": []}, tool_seconds=seconds)
    assert rollouts.held[0].failed_by == "infrastructure"
    [reason] = lost
    assert says in reason


def test_prompts_without_the_server_s_tools_are_an_error_that_says_so(words: Any, tools: list[dict[str, Any]]) -> None:
    _, [lost] = conversed(words, tools[:2], {"command": SERVER}, {"go": ["add"]})
    assert "the first request has the tools add, count, complain" in lost
    rollouts, lost_ones = conversed(words, tools[:2], {"command": SERVER, "only": ["count", "add"]}, {"go": ["add"]})
    assert not lost_ones
    assert replies(rollouts) == ["1\n."]


def test_a_server_over_http(tmp_path: Path) -> None:
    """One of the package's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = (
        "import sys; from mcp.server import MCPServer\n"
        "server = MCPServer('big')\n"
        "@server.tool()\ndef add(a: int) -> int:\n    return a + 1\n"
        f"server.run('streamable-http', host='127.0.0.1', port={port})\n"
    )
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen([sys.executable, "-c", script], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        for _ in range(400):
            with_server = _answers(url)
            if with_server:
                break
            time.sleep(0.1)

        async def call() -> tuple[list[str], str, str]:
            tools = McpTools(url=url)
            names = [str(tool["function"]["name"]) for tool in await tools.reset({})]  # type: ignore[index]
            right = await tools.call("add", {"a": 2})
            wrong = await tools.call("add", {"a": "two"})
            await tools.close()
            return names, right, wrong

        names, right, wrong = asyncio.run(call())
        assert names == ["add"]
        assert right == "3"
        assert wrong.startswith("error: ")
        process.kill()
        process.wait()
        with pytest.raises(InfrastructureFailed, match="cannot be talked to"):
            asyncio.run(McpTools(url=url).reset({}))
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url).status_code < 500
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "give either the command of a server or the url of one"),
        ({"command": ["none-such"]}, "there is no program 'none-such'"),
        ({"command": SERVER, "url": "http://x"}, "give either"),
        ({"command": SERVER, "api_key_env": "KEY"}, "api_key_env: has no effect without url"),
        ({"url": "localhost"}, "begins with neither http:// nor https://"),
        ({"url": "http://x", "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
        ({"url": "http://x", "environment": {"A": "b"}}, "environment: has no effect without command"),
        ({"commnd": SERVER}, "did you mean 'command'"),
    ],
)
def test_a_server_is_refused_before_the_run(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment_maker("mcp", params)
