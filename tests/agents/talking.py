"""A small tokenizer with a chat template, an engine of arithmetic, and agents that wait for as long as they are told."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from megatron_rl.agents.failures import ModelFailed
from megatron_rl.agents.host import Conversations
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.schema import AgentConfig, Config, TaskConfig, TasksConfig
from megatron_rl.data.rollout import Rollout, Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.dispatch import Dispatcher
from megatron_rl.rollout.engine import Completion, Failure, Request
from megatron_rl.rollout.generate import generate
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime.attempts import ATTEMPT
from megatron_rl.runtime.distributed import EngineGroup
from megatron_rl.tasks.loading import load_task
from megatron_rl.weights.create import write_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content or '' }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :.,?!+=\n"
CREATE = {"characters": CHARACTERS, "vocab_size": 64, "hidden": 32, "ffn_hidden": 64, "layers": 1, "max_positions": 512}


def tokenizer(folder: Path) -> Any:
    write_tokenizer(folder, CreateModelConfig(characters=CHARACTERS, vocab_size=64))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return AutoTokenizer.from_pretrained(str(folder))


def recipe(agent: str, prompts: Path | None = None, **keys: Any) -> Config:
    """A recipe with the task `t`, about whose prompts an agent of this file converses."""
    known = agent if ":" in agent or agent == "tools" else f"{__name__}:{agent}"
    section = AgentConfig(known, **{"max_turns": 4, "seconds": 20.0, **keys})
    task = TaskConfig(source="jsonl", path=str(prompts), chat=True, agent=section)
    return Config(run_dir="", seed=7, tasks=TasksConfig(train={"t": task}))


def samples(folder: Path, config: Config, words: Any, texts: Sequence[str]) -> list[Sample]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{text}", "answer": "{number}"}}\n' for number, text in enumerate(texts)))
    task = config.tasks.train["t"]
    task.path = str(path)
    return load_task("t", task, words)


OF_EXPERTS = np.dtype((np.uint8, (2, 3)))


def routed(tokens: Sequence[int]) -> np.ndarray:
    """Experts as an engine returns them: of a token and all before it; the last, of which nothing was computed, has those of
    the one before."""
    sums = np.cumsum((np.asarray(tokens, dtype=np.int64) + 1) * 2_654_435_761 % 2**32)
    experts = np.stack([sums // 256**i % 256 for i in range(6)], axis=1).astype(np.uint8).reshape(-1, 2, 3)
    return np.concatenate([experts[:-1], experts[-2:-1]])


class Arithmetic:
    """An engine that draws letters by a hash of the seed and of all that came before, a token per pass and request."""

    experts, max_scored = OF_EXPERTS, 1000

    def __init__(self, version: int = 3, most: int = 6, room: int = 64) -> None:
        self.version, self.room, self._most = version, room, most
        self._queue: list[tuple[Request, list[int]]] = []
        self.submitted: list[Request] = []

    @property
    def pending(self) -> int:
        return len(self._queue)

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted += requests
        self._queue += [(request, []) for request in requests]

    def step(self) -> list[Completion | Failure]:
        ended: list[Completion | Failure] = []
        for request, ids in list(self._queue):
            before = f"{request.seed}/{list(request.tokens)}/{ids}".encode()
            number = int.from_bytes(hashlib.blake2b(before, digest_size=4).digest())
            ids.append(1 if len(ids) > 1 and number % self._most == 0 else 2 + number % 26)
            if ids[-1] == 1 or len(ids) == request.sampling.max_tokens:
                self._queue.remove((request, ids))
                reason = "stop" if ids[-1] == 1 else "length"
                drawn = np.zeros(0, dtype=np.float32)
                logprobs = [-1.0 / (1 + token) for token in ids]
                ended.append(
                    Completion(request, ids, logprobs, reason, self.version, drawn, routed([*request.tokens, *ids]))
                )
        return ended


def dispatcher(
    group: EngineGroup | None = None, gather: Callable[[bytes], list[bytes]] = lambda data: [data]
) -> Dispatcher:
    grid: Any = SimpleNamespace(engine=group or EngineGroup(), all_gather_bytes=gather)
    return Dispatcher(grid, Arithmetic().room)


@contextmanager
def hosted(config: Config, words: Any) -> Iterator[Conversations]:
    conversations = Conversations(config, EngineGroup(), words)
    try:
        yield conversations
    finally:
        conversations.close()


def conversed(
    conversations: Conversations,
    prompts: Sequence[Sample],
    count: int = 2,
    engine: Any = None,
    tokens: int = 60,
    journal: tuple[Path, str] | None = None,
) -> Rollouts:
    engine = engine or Arithmetic()
    make = conversations.episodes(Sampling(1.0, 1.0, tokens), 5, engine.version, journal, engine.experts)
    return generate(engine, dispatcher(), prompts, count, make, poll=conversations.poll)


def bits(rollouts: Rollouts) -> list[Any]:
    """All that is trained on or scored."""
    return [one(rollouts.held[row]) for row in sorted(rollouts.held)]


def one(rollout: Rollout) -> Any:
    assert rollout.experts is not None
    assert len(rollout.experts) == rollout.num_tokens
    of_tokens = [part.tobytes() for part in (rollout.tokens, rollout.loss_mask, rollout.logprobs, rollout.experts)]
    worth = {**rollout.agent_rewards, "of turns": dict(rollout.turn_rewards)}
    return rollout.sample_id, rollout.index, of_tokens, rollout.messages, worth, rollout.failed_by


# -------------------------------------------------------------------------------------------------------------- agents
HURRY = 0
"""Changes the latencies of `patient`."""


async def turns(model: Any, task: Any, count: int, between: Callable[[int], Any] = lambda turn: None) -> list[Any]:
    """Asks `count` times, each time with a word more about the reply."""
    messages = list(task["prompt"])
    for turn in range(count):
        reply = await model.chat.completions.create(model="policy", messages=messages)
        said = reply.choices[0].message
        messages += [said.to_dict(), {"role": "user", "content": f"{len(said.content)} and {turn}?"}]
        waited = between(turn)
        if waited is not None:
            await waited
    return messages[:-1]


def patient(turns_each: int = 3, latency: int = 0, longest: float = 0.0) -> Any:
    """Waits after each turn.

    Args:
        latency: seed of how long, 0: not at all.
        longest: seconds; 0: a few milliseconds.
    """

    async def run(model: Any, task: Any) -> dict[str, float]:
        draw = random.Random(f"{latency + HURRY}/{task['seed']}")

        def wait(turn: int) -> Any:
            if not latency:
                return None
            return asyncio.sleep(draw.uniform(0, longest) if longest else draw.choice([0.0, 0.001, 0.004, 0.02]))

        messages = await turns(model, task, turns_each, wait)
        of_task = float(task["seed"] % 1000)
        return {"reward": float(len(messages)), "letters": float(len(messages[-1]["content"])), "seed": of_task}

    return run


def failing(how: str, first_only: bool = False, of: str = "") -> Any:
    """Fails in the prompts whose text contains `of`, in the first attempt only or in each."""
    attempts: dict[int, int] = {}

    async def run(model: Any, task: Any) -> float | None:
        attempt = attempts[task["seed"]] = attempts.get(task["seed"], 0) + 1
        messages = await turns(model, task, 1)
        if of in str(task["prompt"]) and (attempt == 1 or not first_only):
            if how == "raise":
                raise ConnectionError("the shop is closed")
            if how == "exit":
                sys.exit(3)
            if how == "hang":
                await asyncio.sleep(1e6)
            if how == "block":
                time.sleep(1.0)
            if how == "fork":
                await model.chat.completions.create(model="policy", messages=[*task["prompt"], messages[0]])
            if how == "limit":
                await turns(model, {"prompt": [*messages, {"role": "user", "content": "go on"}]}, 9)
            if how == "give up":
                raise ModelFailed("nonsense")
            if how == "text":
                return "good"  # type: ignore[return-value]
            if how == "none":
                return None
        return 1.0

    return run


SAID: list[str] = []
"""What `nosy` and `fussy` were told."""


def fussy() -> Any:
    """Asks for what is not supported, and then as it should."""
    asks: list[dict[str, Any]] = [
        {"n": 2},
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"logprobs": True},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"stop": ["x"]},
        {"max_tokens": 0},
        {"messages": [{"role": "user", "content": "something else"}]},
    ]

    async def run(model: Any, task: Any) -> float:
        for ask in asks:
            with pytest.raises(openai.BadRequestError) as refusal:
                await model.chat.completions.create(**{"model": "policy", "messages": task["prompt"], **ask})
            SAID.append(f"{refusal.value.code}: {refusal.value}")
        usual = {"temperature": 1.0, "n": 1, "stream": False, "user": "me", "max_tokens": 2}
        reply = await model.chat.completions.create(model="policy", messages=task["prompt"], **usual)
        return float(reply.usage.completion_tokens)

    return run


def nosy() -> Any:
    """Two conversations, each of which tries the other's address with its own key."""
    addresses: dict[int, tuple[str, str]] = {}

    async def run(model: Any, task: Any) -> float:
        addresses[task["seed"]] = str(model.base_url), model.api_key
        while len(addresses) < 2:
            await asyncio.sleep(0.001)
        [(other, _)] = [pair for seed, pair in addresses.items() if seed != task["seed"]]
        for url, key in (
            (other, model.api_key),
            (other, ""),
            (other.replace("sessions/", "sessions/9"), model.api_key),
        ):
            stranger = model.with_options(base_url=url, api_key=key or "none")
            with pytest.raises(openai.AuthenticationError) as refusal:
                await stranger.chat.completions.create(model="policy", messages=task["prompt"])
            SAID.append(str(refusal.value))
        await turns(model, task, 1)
        return 1.0

    return run


def program(script: str, dialects: tuple[str, ...] = ()) -> Any:
    """An agent that is a program of its own: it is told an address, a key and a question. `dialects`: the one that it speaks
    is by the rollout's seed; it posts its reward then."""

    async def run(model: Any, task: Any) -> float | None:
        more = [dialects[task["seed"] % len(dialects)]] if dialects else []
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, script, task.base_url, task.api_key, str(task["prompt"][0]["content"]), *more),
            stdout=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"]},
        )
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"{script} ended with code {process.returncode}")
        return None if more else float(out)

    return run


def parting(latency: int = 0) -> Any:
    """Two turns, another second turn, another first, and then another conversation, of two turns, about their answers."""

    async def run(model: Any, task: Any) -> float:
        draw = random.Random(latency)

        async def ask(messages: list[Any]) -> Any:
            try:
                reply = await model.chat.completions.create(model="policy", messages=messages)
            except openai.APIStatusError as error:
                SAID.append(f"{error.code}: {error}")
                raise
            await asyncio.sleep(draw.choice([0.0, 0.001, 0.01]) if latency else 0.0)
            return reply.choices[0].message.to_dict()

        prompt = list(task["prompt"])
        first = await ask(prompt)
        further = [*prompt, first, {"role": "user", "content": "go on"}]
        answers = [await ask(further), await ask(further), await ask(prompt)]
        # Letters only: the tokenizer knows no text of a special token.
        about = " or ".join("".join(filter(str.islower, str(answer["content"]))) for answer in answers)
        other = [{"role": "user", "content": f"which? {about}"}]
        choice = await ask(other)
        last = await ask([*other, choice, {"role": "user", "content": "sure?"}])
        return float(len(last["content"] or ""))

    return run


SHOP: list[Any] = []
"""What the customers of `moody` have asked so far."""


def turned(numbers: bool = False, more: int = 0, of: str = "") -> Any:
    """Has one to four turns, by its seed, and rewards each.

    Args:
        numbers: it returns their sum instead.
        more: rewards that no turn has.
        of: it gives up after its turns where the prompt contains this.
    """

    async def run(model: Any, task: Any) -> dict[str, Any]:
        messages = await turns(model, task, 1 + task["seed"] % 4)
        if of and of in str(task["prompt"]):
            raise ModelFailed("nonsense")
        rewards = [len(message["content"]) / 8 for message in messages[1::2]] + [0.5] * more
        return {"of turns": sum(rewards) if numbers else rewards, "short": float(len(messages[-1]["content"]) < 5)}

    return run


def moody(
    turns_each: int = 3, recorded: bool = True, word: str = "and", parts: bool = False, remembers: bool = False
) -> Any:
    """Asks a shop between two turns, which says something else the second time that it is asked the same.

    Args:
        parts: two answers more to the last, and another conversation, about these.
        remembers: the shop is a file in the run folder.
    """

    async def run(model: Any, task: Any) -> dict[str, Any]:
        messages, heard = list(task["prompt"]), list[float]()

        async def turn(messages: list[Any]) -> Any:
            reply = await model.chat.completions.create(model="policy", messages=messages)
            return reply.choices[0].message.to_dict()

        async def ask() -> list[object]:
            key = task["seed"], len(messages)
            asked = SHOP
            if remembers:
                with (shop := Path(os.environ[ATTEMPT]).parents[1] / "shop.txt").open("a") as file:
                    file.write(f"{key}\n")
                asked, key = shop.read_text().splitlines(), str(key)  # type: ignore[assignment]
            else:
                SHOP.append(key)
            return [len(messages) % 7, "once" if asked.count(key) == 1 else f"{asked.count(key)} times"]

        for _ in range(turns_each):
            answer = await turn(messages)
            said = await (task.recorded(messages, ask) if recorded else ask())
            messages += [answer, {"role": "user", "content": f"{said[0]} {word} {said[1]}"}]
            heard.append(said[0] / 7)
        if parts:
            answers = [await turn(messages), await turn(messages)]
            about = " or ".join("".join(filter(str.islower, str(answer["content"]))) for answer in answers)
            messages.append(await turn([{"role": "user", "content": f"which? {about}"}]))
        rewards = {"reward": float(len(messages)), "once": sum("once" in str(message) for message in messages)}
        return rewards if parts else {**rewards, "heard": heard}

    return run
