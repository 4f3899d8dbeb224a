"""A session whose turns are written by a test, behind the endpoint, and what the dialects' clients send to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai

from megatron_rl.agents import endpoint
from megatron_rl.agents.session import Opening, Patience, Session
from megatron_rl.config.schema import AgentConfig
from megatron_rl.data.sample import Message, Sample
from megatron_rl.rollout.engine import Completion, Request
from megatron_rl.rollout.sampling import Sampling
from tests.agents.conversing import TOOLS, renderer_of
from tests.agents.families import FAMILIES, tokenizer_of

THOUGHT = "<think>\nHm.\n</think>\n\n"
CALLS = (
    FAMILIES["qwen3"].call("look", {"what": "lamp", "n": 1})
    + "\n"
    + FAMILIES["qwen3"].call("look", {"what": "é\ud83d"})
)


class Held:
    """A session whose turns are written here, behind the endpoint."""

    def __init__(
        self, *turns: str, tools: Any = TOOLS, system: bool = False, agent: Any = None, **sampling: Any
    ) -> None:
        tokenizer, renderer = tokenizer_of("qwen3"), renderer_of("qwen3")
        self.tokenizer, self._turns = tokenizer, list(turns)
        prompt: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
        prompt.append({"role": "user", "content": "Look."})
        sample = Sample(
            "t/0", "t", prompt, renderer.first(prompt, tools), metadata={"tools": tools} if tools else {}, agent="t"
        )
        drawn = Sampling(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": 4000, **sampling})
        opening = Opening(
            sample, 0, drawn, 3, 1, "tasks.train.t", AgentConfig("a", parser="hermes", **(agent or {})), 2
        )
        self.requests: list[Request] = []
        self.hold, self._held = False, list[Completion]()  # turns are answered at `release`
        self.session = Session("1", opening, renderer, tokenizer, Patience(100.0), self._ask)
        self.app = endpoint.make_app({"1": self.session}.get)

    def _ask(self, request: Request) -> None:
        self.requests.append(request)
        text = self._turns.pop(0)
        end = [] if text.endswith("...") else [self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], *end]
        reason: Any = "stop" if end else "length"
        logprobs = [-0.5 - i for i in range(len(ids))]
        done = Completion(request, ids, logprobs, reason, 2, np.zeros(0, dtype=np.float32))
        if self.hold:
            self._held.append(done)
        else:
            asyncio.get_running_loop().call_soon(self.session.answer, done)

    def release(self) -> None:
        for done in self._held:
            self.session.answer(done)

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app))

    def openai(self) -> openai.AsyncOpenAI:
        address, key = "http://engine/sessions/1/v1", self.session.api_key
        return openai.AsyncOpenAI(base_url=address, api_key=key, http_client=self.http(), max_retries=0)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        address, key = "http://engine/sessions/1", self.session.api_key
        return anthropic.AsyncAnthropic(base_url=address, api_key=key, http_client=self.http(), max_retries=0)

    async def post(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        headers = {"authorization": f"Bearer {self.session.api_key}"}
        return await self.http().post(f"http://engine/sessions/1/{path}", json=body, headers=headers)


FUNCTION = {"type": "function", "strict": False, "description": None, **TOOLS[0]["function"]}
CLAUDES: Any = {
    "name": "look",
    "description": TOOLS[0]["function"]["description"],
    "input_schema": TOOLS[0]["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}
USER = {"role": "user", "content": "Look."}


def code_of(answer: httpx2.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]
