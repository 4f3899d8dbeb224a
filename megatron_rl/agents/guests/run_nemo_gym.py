"""Runs servers of NeMo-Gym: a program for `.venv-agents/nemo-gym` (`make agents-setup`), which does not import this package.

    run_nemo_gym.py             serves the agent `nemo_gym`
    run_nemo_gym.py export ...  writes a dataset's prompts as JSON lines

All servers of a configuration are in this one process, each on its port of the loopback interface (`ng_run` starts a process
for each). The model server is NeMo-Gym's for vLLM; it asks the conversation that a call belongs to, which a header says.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import nemo_gym
import pipe
import uvicorn
from nemo_gym.global_config import (
    NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    GlobalConfigDictParser,
    get_first_server_config_dict,
)
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.responses_converter import VLLMConverter
from nemo_gym.server_utils import ServerClient, get_response_json
from omegaconf import DictConfig, OmegaConf
from responses_api_models.vllm_model.app import VLLMModel

HEADER = "x-rollout-session"
MODEL = "policy_model"  # the name that NeMo-Gym's configurations give the server of the model
KINDS = ("responses_api_models", "resources_servers", "responses_api_agents")
OF_CALL: ContextVar[str | None] = ContextVar("session", default=None)
SESSIONS: dict[str, NeMoGymAsyncOpenAI] = {}


class Client(ServerClient):
    """Servers call each other with it. It says whose call theirs is part of."""

    async def request(self, server_name: str, url_path: str, method: str, **kwargs: Any) -> Any:
        if (session := OF_CALL.get()) is not None:
            kwargs["headers"] = {**(kwargs.get("headers") or {}), HEADER: session}
        return await super().request(server_name, url_path, method, **kwargs)


class PolicyModel(VLLMModel):
    """NeMo-Gym's server for vLLM, which asks the conversation's address."""

    def _resolve_client(self, request: Any) -> NeMoGymAsyncOpenAI:
        session = OF_CALL.get()
        if session not in SESSIONS:
            raise RuntimeError(
                f"a call of the model server without {HEADER}: the agent calls it by another way than ServerClient"
            )
        return SESSIONS[session]


class GymServer(uvicorn.Server):
    """Leaves signals to the program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class OfCall:
    """An ASGI app that knows whose call it serves."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            named = dict(scope["headers"]).get(HEADER.encode())
            OF_CALL.set(named.decode() if named is not None else None)
        await self._app(scope, receive, send)


def configured(paths: list[str], changes: dict[str, Any]) -> DictConfig:
    """NeMo-Gym's configuration of these files, with the model server of this program and free ports."""
    model = {
        "entrypoint": "app.py",
        "base_url": "http://127.0.0.1/each-conversation-has-its-own",
        "api_key": "each conversation has its own",
        "model": "policy",
        "return_token_id_information": False,
        "uses_reasoning_parser": True,
        "replace_developer_role_with_system": True,
    }
    given = OmegaConf.merge({"config_paths": paths, MODEL: {KINDS[0]: {"vllm_model": model}}}, changes)
    config = GlobalConfigDictParser().parse_no_environment(initial_global_config_dict=given)
    os.environ[NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = OmegaConf.to_yaml(config)  # as `ng_run` tells its servers
    return config


def servers(config: DictConfig) -> dict[str, tuple[str, str]]:
    """Each server's kind and its folder, by name."""
    found = {}
    for name, value in config.items():
        for kind in KINDS if isinstance(value, DictConfig) else ():
            for folder in value.get(kind) or ():
                found[str(name)] = kind, str(folder)
    return found


def server_class(kind: str, folder: str, entrypoint: str) -> Any:
    """The class that a server's program runs."""
    roots = [Path.cwd(), nemo_gym.PARENT_DIR]
    source = next(
        (root / kind / folder / entrypoint for root in roots if (root / kind / folder / entrypoint).exists()), None
    )
    if source is None:
        raise FileNotFoundError(f"there is no {kind}/{folder}/{entrypoint} below {' or '.join(map(str, roots))}")
    sys.path.append(str(source.parent))
    named = re.findall(r"^\s+(?:\w+ = )?(\w+)\.run_webserver\(\)", source.read_text(), re.MULTILINE)
    if not named:
        raise ValueError(f"{source} runs no server: it has no line `….run_webserver()`")
    return getattr(_module(source, f"{kind}.{folder}.{source.stem}"), named[0])


def _module(source: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def app_of(name: str, kind: str, folder: str, config: DictConfig) -> Any:
    """A server's app, made as its own program makes it."""
    section = get_first_server_config_dict(config, name)
    known: Any = PolicyModel if name == MODEL else server_class(kind, folder, section.entrypoint)
    os.environ[NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME] = name
    client = Client(head_server_config=Client.load_head_server_config(), global_config_dict=config)
    server = known(config=known.load_config_from_global_config(), server_client=client)
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    return OfCall(app)


def agent_of(config: DictConfig, server: str | None) -> str:
    """The agent server's name."""
    agents = sorted(name for name, (kind, _) in servers(config).items() if kind == "responses_api_agents")
    if server is not None and server in agents:
        return server
    if server is None and len(agents) == 1:
        return agents[0]
    raise ValueError(
        f"`server` is {server!r}, and the configuration has the agent servers {', '.join(agents) or 'none'}"
    )


@asynccontextmanager
async def world(params: dict[str, Any]) -> AsyncIterator[pipe.Answer]:
    config = configured(params["config_paths"], params["changes"])
    agent = agent_of(config, params["server"])
    running = []
    for name, (kind, folder) in servers(config).items():
        section = get_first_server_config_dict(config, name)
        listener = socket.create_server((section.host, section.port), backlog=1024)
        quiet = uvicorn.Config(app_of(name, kind, folder, config), log_level="warning", access_log=False)
        running.append((GymServer(quiet), listener))
    tasks = [asyncio.create_task(server.serve([listener])) for server, listener in running]
    client = Client(head_server_config=Client.load_head_server_config(), global_config_dict=config)

    async def run(request: dict[str, Any]) -> dict[str, Any]:
        name = request["name"]
        SESSIONS[name] = NeMoGymAsyncOpenAI(base_url=request["base_url"], api_key=request["api_key"])
        OF_CALL.set(name)
        try:
            response = await client.post(agent, "/run", json=request["row"])
            if not response.ok:
                raise RuntimeError(f"{agent}/run answered {response.status}: {(await response.text())[:1000]}")
            return verdict(await get_response_json(response))
        finally:
            del SESSIONS[name]

    try:
        yield run
    finally:
        for server, _ in running:
            server.should_exit = server.force_exit = True
        await asyncio.wait(tasks, timeout=2)


def verdict(reply: dict[str, Any]) -> dict[str, Any]:
    """The reward, and every other number of the reply, by column."""
    if not isinstance(reply.get("reward"), int | float):
        raise RuntimeError(f"the reply has no reward, but {', '.join(reply)}")
    numbers = {name: float(value) for name, value in reply.items() if isinstance(value, bool | int | float)}
    return {name: None if math.isnan(value) else value for name, value in numbers.items() if name[0] != "_"}


def row_of(line: str) -> dict[str, Any]:
    """A dataset's row as a prompt: the messages and tools of the model's first request, and the row."""
    row = json.loads(line)
    # What is drawn is drawn as the recipe says.
    request = {
        k: v
        for k, v in row["responses_create_params"].items()
        if k not in ("temperature", "top_p", "max_output_tokens", "model")
    }
    converter = VLLMConverter(return_token_id_information=False, uses_reasoning_parser=True)
    parameters = NeMoGymResponseCreateParamsNonStreaming.model_validate(request)
    first = converter.responses_to_chat_completion_create_params(parameters).model_dump(exclude_unset=True)
    tools = {"tools": first["tools"]} if first.get("tools") else {}
    for message in first["messages"]:
        message["role"] = "system" if message["role"] == "developer" else message["role"]
    return {
        "prompt": list(first["messages"]),
        **tools,
        "metadata": {"nemo_gym_row": {**row, "responses_create_params": request}},
    }


def export(arguments: list[str]) -> None:
    """Writes the prompts of a dataset."""
    parser = argparse.ArgumentParser(
        prog="run_nemo_gym.py export", description="Writes a dataset's prompts as JSON lines."
    )
    parser.add_argument(
        "data", help="NeMo-Gym's JSON lines; below its package, too: resources_servers/NAME/data/example.jsonl"
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, help="so many rows, the first ones")
    given = parser.parse_args(arguments)
    source = Path(given.data) if Path(given.data).exists() else nemo_gym.PARENT_DIR / given.data
    # Not `splitlines`: JSON's texts may have U+2028 and its like.
    lines = [line for line in source.read_text().split("\n") if line.strip()][: given.size]
    given.out.write_text("".join(json.dumps(row_of(line)) + "\n" for line in lines))
    print(f"{given.out}: {len(lines)} prompts")


if __name__ == "__main__":
    pipe.main(world, export)
