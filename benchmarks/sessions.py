"""What the endpoint of agents costs: many conversations at once with an engine that draws nothing and takes its time.

`python -m benchmarks.sessions` holds 1,000 conversations of four turns at once and prints a line of JSON: the milliseconds
that a turn takes beside the engine's (median, 99th percentile), the CPU time per turn, and the memory per conversation.
`--http`: the agents are clients in another process, which shares the cores. Every turn has `--reply` tokens, and the engine
takes `--seconds` for it; the conversations begin one after the other within as long.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from transformers import AutoTokenizer

from benchmarks.others import told
from megatron_rl.agents.host import Conversations
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.schema import AgentConfig, Config, TaskConfig, TasksConfig
from megatron_rl.rollout.dispatch import Dispatcher
from megatron_rl.rollout.engine import Completion, Failure, Request
from megatron_rl.rollout.generate import generate
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime.distributed import EngineGroup
from megatron_rl.tasks.loading import load_task
from megatron_rl.weights.create import write_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :.,?!+=\n"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
EOS, LETTER = 1, 2
PASS = 0.005  # seconds of a pass of the engine

TURNS: list[tuple[float, float]] = []
"""(when an agent asked, when it was answered) of all turns of this process."""


class Stub:
    """An engine that takes its time, and draws one letter."""

    experts, max_scored = None, 1000

    def __init__(self, seconds: float, reply: int) -> None:
        self.version, self._seconds, self._reply = 1, seconds, reply
        self._queue = deque[tuple[Request, float]]()
        self.spent: list[float] = []  # seconds from each request's arrival to its answer
        self.most = 0

    @property
    def pending(self) -> int:
        return len(self._queue)

    def submit(self, requests: Sequence[Request]) -> None:
        now = time.perf_counter()
        self._queue += [(request, now) for request in requests]
        self.most = max(self.most, len(self._queue))

    def step(self) -> list[Completion | Failure]:
        time.sleep(PASS)
        now = time.perf_counter()
        ended: list[Completion | Failure] = []
        while self._queue and now - self._queue[0][1] >= self._seconds:
            request, since = self._queue.popleft()
            ids = [LETTER] * (self._reply - 1) + [EOS]
            ended.append(Completion(request, ids, [-1.0] * len(ids), "stop", 1, np.zeros(0, dtype=np.float32)))
            self.spent.append(time.perf_counter() - since)
        return ended


def talker(turns: int, seconds: float, follow_up: int) -> Any:
    """An agent in the trainer's process."""

    async def run(model: Any, task: Any) -> float:
        await asyncio.sleep(random.Random(task["seed"]).random() * seconds)
        await talk(model, list(task["prompt"]), turns, follow_up)
        return 1.0

    return run


async def talk(model: Any, messages: list[Any], turns: int, follow_up: int) -> None:
    for _ in range(turns):
        asked = time.perf_counter()
        answer = await model.chat.completions.create(model="policy", messages=messages)
        TURNS.append((asked, time.perf_counter()))
        messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "b" * follow_up}]


def outsider(turns: int, seconds: float, follow_up: int) -> Any:
    """An agent whose program is in another process, and posts its reward."""

    async def run(model: Any, task: Any) -> Any:
        await asyncio.sleep(random.Random(task["seed"]).random() * seconds)
        OUTSIDE[0].send((task.base_url, task.api_key, task["prompt"], turns, follow_up))
        return await task.posted_reward()

    return run


OUTSIDE: list[Connection] = []


def clients(orders: Connection) -> None:
    """The other process: converses as it is told, and sends when it asked and was answered in the end."""
    import httpx2
    from openai import AsyncOpenAI

    async def serve() -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        shared = httpx2.AsyncClient(limits=limits, timeout=None, trust_env=False)
        tasks = set[asyncio.Task[None]]()

        async def one(address: str, key: str, messages: list[Any], turns: int, follow_up: int) -> None:
            model = AsyncOpenAI(base_url=address, api_key=key, http_client=shared, max_retries=0)
            await talk(model, messages, turns, follow_up)
            await model.post("/reward", cast_to=object, body={"reward": 1.0})

        while (order := await asyncio.to_thread(orders.recv)) is not None:
            tasks.add(asyncio.create_task(one(*order)))
        await asyncio.gather(*tasks)
        used = resource.getrusage(resource.RUSAGE_SELF)
        orders.send((TURNS, used.ru_utime + used.ru_stime))

    asyncio.run(serve())


@contextmanager
def outside() -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=clients, args=(theirs,), daemon=True)
    process.start()
    OUTSIDE[:] = [mine]
    try:
        yield mine
    finally:
        process.join(20)


def hold(args: argparse.Namespace) -> dict[str, float]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), CreateModelConfig(characters=CHARACTERS, vocab_size=64))
        (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        params = {"turns": args.turns, "seconds": args.seconds, "follow_up": args.follow_up}
        name = f"benchmarks.sessions:{'outsider' if args.http else 'talker'}"
        agent = AgentConfig(name, params=params, max_turns=args.turns, seconds=1e5)
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": "a" * args.prompt}) + "\n" for _ in range(args.sessions)))
        task = TaskConfig(source="jsonl", path=str(prompts), chat=True, agent=agent)
        config = Config(run_dir="", seed=7, tasks=TasksConfig(train={"t": task}))
        samples = load_task("t", task, tokenizer)
    conversations, engine = Conversations(config, EngineGroup(), tokenizer), Stub(args.seconds, args.reply)
    grid: Any = SimpleNamespace(engine=EngineGroup(), all_gather_bytes=lambda data: [data])
    make = conversations.episodes(Sampling(1.0, 1.0, 10**6), 1, 1)
    gc.collect()
    gc.freeze()  # as every rank does once it has imported all
    process = psutil.Process()
    before, began, cpu = process.memory_info().rss, time.perf_counter(), process.cpu_times()
    served: Any = engine
    rollouts = generate(served, Dispatcher(grid, args.sessions), samples, 1, make, poll=conversations.poll)
    wall, used = time.perf_counter() - began, process.cpu_times()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    turns, spent_outside = TURNS, 0.0
    if args.http:
        OUTSIDE[0].send(None)
        turns, spent_outside = OUTSIDE[0].recv()
    conversations.close()
    assert len(turns) == len(engine.spent) == args.sessions * args.turns
    assert not rollouts.lost.any()
    # The engine's time is the same for all turns, up to a pass and what else the machine has to do.
    added = np.sort([answered - asked for asked, answered in turns]) - np.median(engine.spent)
    median, tail = np.quantile(added, [0.5, 0.99]) * 1000
    spent = used.user + used.system - cpu.user - cpu.system
    return {
        "sessions": args.sessions,
        "at_once_most": engine.most,
        "turns_per_second": round(len(turns) / wall, 1),
        "added_ms_p50": round(median, 1),
        "added_ms_p99": round(tail, 1),
        "engine_ms_p99_over_p50": round(1000 * float(np.quantile(engine.spent, 0.99) - np.median(engine.spent)), 1),
        "cpu_ms_per_turn": round(1000 * spent / len(turns), 2),
        "clients_cpu_ms_per_turn": round(1000 * spent_outside / len(turns), 2),
        "cores_busy": round(spent / wall, 2),
        "mib_per_session": round(memory / args.sessions / 2**20, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the engine's per turn")
    parser.add_argument("--prompt", type=int, default=500, help="tokens of the prompt")
    parser.add_argument("--reply", type=int, default=200, help="tokens of a reply")
    parser.add_argument("--follow-up", type=int, default=200, help="tokens of what an agent says to it")
    parser.add_argument("--http", action="store_true", help="agents in another process")
    args = parser.parse_args()
    if args.http:
        with outside():
            print(json.dumps(hold(args)))
    else:
        print(json.dumps(hold(args)))


if __name__ == "__main__":
    # Agents are made by their name, so this module must be that one, too.
    import benchmarks.sessions

    with told():
        benchmarks.sessions.main()
