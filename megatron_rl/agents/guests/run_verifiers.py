"""Runs a taskset of verifiers: a program for `.venv-agents/verifiers` (`make agents-setup`), without our package.

run_verifiers.py             serves the agent `verifiers`
run_verifiers.py export ...  writes a taskset's prompts as JSON lines
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pipe
import yaml
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def loaded(environment: dict[str, Any], path: str | None) -> Any:
    """The `Env` of an [env] block. `path`: a folder in which tasksets lie."""
    if path is not None:
        sys.path.insert(0, str(Path(path).resolve()))
    # Harnesses are scripts that uv runs; it lies beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return load_environment(resolve_env_config(environment))


@asynccontextmanager
async def world(params: dict[str, Any]) -> AsyncIterator[pipe.Answer]:
    env = loaded(params["environment"], params["path"])
    task_class = type(env.taskset).task_type()
    data_class = task_class.data_type()

    async def roll_out(request: dict[str, Any]) -> dict[str, Any]:
        key = f"SESSION_{request['name']}"  # a client takes its key from a variable only
        os.environ[key] = request["api_key"]
        try:
            task = task_class(data_class.model_validate(request["task"]), env.config.taskset.task)
            client = EvalClientConfig(base_url=request["base_url"], api_key_var=key)
            context = ModelContext(client=client, model="policy", sampling=SamplingConfig())
            (slot,) = env.slots(task)
            return verdict(await env.run_slot(slot, context))
        finally:
            del os.environ[key]

    async with env.serving():
        yield roll_out


def verdict(episode: Any) -> dict[str, Any]:
    """Rewards and metrics by column; RuntimeError where the episode failed, with its errors."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    if len(episode.traces) != 1:
        raise RuntimeError(f"the episode has {len(episode.traces)} traces, and a rollout is one agent's")
    (trace,) = episode.traces
    columns = dict(trace.metrics)
    columns |= {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
    columns["reward"] = trace.reward
    return {name: None if value is None or math.isnan(value) else float(value) for name, value in columns.items()}


def rows(env: Any, size: int | None) -> Iterator[dict[str, Any]]:
    """A taskset's prompts, as its harness begins with them, each with all of its task's data."""
    if size is None and not env.taskset.bounded:
        raise SystemExit("this taskset has no end: say how many tasks by --size")
    (harness,) = {id(harness): harness for harness in env._harnesses.values()}.values()
    for task in islice(env.taskset, size):
        system, prompt = harness.resolve_prompt(task.data)
        if prompt is None:
            raise SystemExit(f"task {task.data.idx} has no prompt: its environment begins the conversation itself")
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
        before = [{"role": "system", "content": system}] if system else []
        yield {"prompt": [*before, *said], "metadata": {"verifiers_task": task.data.model_dump(mode="json")}}


def export(arguments: list[str]) -> None:
    """Writes the prompts of a taskset."""
    parser = argparse.ArgumentParser(
        prog="run_verifiers.py export", description="Writes a taskset's prompts as JSON lines."
    )
    parser.add_argument("environment", help="the [env] block, as YAML: text or a file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--path", help="a folder in which tasksets lie")
    parser.add_argument("--size", type=int, help="so many tasks, the first ones")
    given = parser.parse_args(arguments)
    block = Path(given.environment).read_text() if given.environment.endswith(".yaml") else given.environment
    lines = [json.dumps(row) + "\n" for row in rows(loaded(yaml.safe_load(block), given.path), given.size)]
    given.out.write_text("".join(lines))
    print(f"{given.out}: {len(lines)} prompts")


if __name__ == "__main__":
    pipe.main(world, export)
