"""An engine behind a URL: vLLM's OpenAI-compatible completions, asked with token ids and answered with token ids.

The prompts are the very tokens that the colocated engine would get, and each request has the seed that the rollout would have
there, so a server of the same weights draws the same responses. The weights are the server's own. vLLM 0.32 has routes that
replace them (`/update_weights`, `/sleep`, in its development mode), but every transport of theirs needs a GPU on both sides,
and on a CPU its `reload_weights` leaves packed copies of old weights in use (`seams.vllm_cpu_worker`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal, NoReturn

import numpy as np
from torch import Tensor

from megatron_rl.config.schema import EndpointConfig
from megatron_rl.data.images import PromptImages
from megatron_rl.rollout.drafts import Drafts
from megatron_rl.rollout.engine import Completion, EngineError, Failure, Request, score_by_queue
from megatron_rl.runtime import fetch, http
from megatron_rl.runtime.calls import event_loop

_MODELS_SECONDS = 30.0
_LARGEST_ID = 2**31 - 1
_SOON = 0.05  # seconds that `step` waits for a response: then others may have requests


@dataclass(frozen=True)
class Server:
    """A served model: base URLs of equal servers, and the name it is served under."""

    urls: tuple[str, ...]
    name: str
    root: str = ""  # the model's path, as the first server reports it
    room: int | None = None  # tokens of the longest prompt and its response, likewise


def find_server(urls: Sequence[str], name: str | None, config: EndpointConfig, longest: int) -> Server:
    """Asks every URL for its models.

    Args:
        urls: base URLs, such as `http://host:8000/v1`.
        name: the served name; None: the only one there is.
        longest: tokens of the longest prompt and its response.

    Raises:
        ValueError: a server that does not answer, does not serve that model, or has no room for `longest` tokens.
    """
    several = http.check_urls(urls)
    http.check_key(config.api_key_env)
    root, rooms = "", list[int]()
    for url in several:
        models = {str(model.get("id")): model for model in _models(url, config.api_key_env)}
        if name is None and len(models) == 1:
            name = next(iter(models))
        if name is None or name not in models:
            hint = "--served-name chooses one" if name is None else f"not {name!r}"
            raise ValueError(f"{url} serves {', '.join(map(repr, models)) or 'no model'}; {hint}")
        root = root or str(models[name].get("root", ""))
        room = models[name].get("max_model_len")
        rooms += [room] if isinstance(room, int) else []
        if isinstance(room, int) and room < longest:
            raise ValueError(
                f"{url} serves {name!r} with --max-model-len {room}, but rollout.max_prompt_tokens + rollout.max_tokens is "
                f"{longest}: serve it with room for them, or lower the recipe's limits"
            )
    assert name is not None
    return Server(several, name, root, min(rooms, default=None))


def _models(url: str, api_key_env: str | None) -> list[dict[str, object]]:
    key = None if api_key_env is None else os.environ[api_key_env]
    try:
        models = list(json.loads(fetch.get(f"{url}/models", key, _MODELS_SECONDS))["data"])  # a URL passed `check_urls`
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{url}/models does not list the served models ({error}); is this the base URL of an OpenAI-compatible server, "
            "such as http://localhost:8000/v1?"
        ) from None
    return [model for model in models if isinstance(model, dict)]


class EndpointEngine:
    """An `Engine` of one process, whose model equal servers answer for. It takes no weights.

    `step` waits a moment for the next responses, and raises what makes a server useless:

    Raises:
        EndpointError: the server refuses access, or does not know the model.
        ValueError: the server does not return token ids, or more than were asked for.
    """

    def __init__(self, server: Server, config: EndpointConfig) -> None:
        self.version, self.room = 0, config.max_in_flight
        self.experts: np.dtype | None = None
        self.drafts: Drafts | None = None
        self.max_scored = sys.maxsize if server.room is None else server.room - 1  # scoring draws a token
        self._name = server.name
        self._endpoint = http.Endpoint(server.urls, config, is_reply=lambda reply: bool(reply.get("choices")))
        self._pending: set[Future[Completion | Failure]] = set()
        self._ended: SimpleQueue[Future[Completion | Failure]] = SimpleQueue()

    @property
    def pending(self) -> int:
        return len(self._pending)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            future = asyncio.run_coroutine_threadsafe(self._ask(request), event_loop())
            self._pending.add(future)
            future.add_done_callback(self._ended.put)

    def step(self) -> list[Completion | Failure]:
        if not self._pending:
            return []
        try:
            ended = [self._ended.get(timeout=_SOON)]
        except Empty:
            return []
        while not self._ended.empty():
            ended.append(self._ended.get())
        self._pending.difference_update(ended)
        return [future.result() for future in ended]

    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None] = ()) -> list[np.ndarray]:
        return score_by_queue(self, sequences, images)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> NoReturn:
        self._refuse("loads none")

    def sleep(self) -> NoReturn:
        self._refuse("does not give up its memory")

    def wake(self, part: Literal["weights", "cache"]) -> NoReturn:
        self._refuse("has never slept")

    def _refuse(self, why: str) -> NoReturn:
        raise EngineError(f"{self._endpoint.urls[0]} serves {self._name!r} with weights of its own, and {why}")

    def shutdown(self) -> None:
        """The servers go on without this client."""
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        asyncio.run_coroutine_threadsafe(self._endpoint.close(), event_loop()).result()

    async def _ask(self, request: Request) -> Completion | Failure:
        try:
            return _completion(request, await self._endpoint.post("/completions", _body(self._name, request)))
        except http.Unanswered as error:
            return Failure(request, str(error))


def _body(name: str, request: Request) -> dict[str, object]:
    """One request. It sets everything that the server would otherwise take from the model's generation_config.json."""
    if request.images is not None:
        raise ValueError("a served model is asked with token ids, which hold no images")
    body: dict[str, object] = {
        "model": name,
        "prompt": list(request.tokens),
        "max_tokens": request.sampling.max_tokens,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        "return_token_ids": True,
    }
    body |= {} if request.seed is None else {"seed": request.seed}
    return body | ({"prompt_logprobs": 0} if request.scores_tokens else {})


def _completion(request: Request, reply: Mapping[str, object]) -> Completion:
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise http.Unanswered(f"the server ended the response with {reason!r}")
    tokens, prompt = choice.get("token_ids"), list(request.tokens)
    if not isinstance(tokens, list):
        raise ValueError(
            "the server does not return token ids (`return_token_ids`, vLLM 0.10.2 and later); text is never tokenised again"
        )
    if not all(type(token) is int and 0 <= token <= _LARGEST_ID for token in tokens):
        raise ValueError(f"the server's token ids are no whole numbers from 0 on: {str(tokens)[:200]}")
    if len(tokens) > request.sampling.max_tokens:
        raise ValueError(
            f"the server answered {len(tokens)} tokens to a request of at most {request.sampling.max_tokens}"
        )
    if choice.get("prompt_token_ids", prompt) != prompt:
        raise ValueError(
            f"the server changed the prompt of {request.name[0]} to {str(choice['prompt_token_ids'])[:200]}"
        )
    scores: list[float] = []
    if request.scores_tokens:  # one entry per token, {id: {logprob}}; null for the first
        try:
            entries = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
            scores = [float(entry[str(token)]["logprob"]) for token, entry in entries]
        except (LookupError, TypeError, ValueError, OverflowError):
            raise ValueError("the server does not return the log-probs of a prompt (`prompt_logprobs`)") from None
    return Completion(request, tokens, None, reason, 0, np.asarray(scores, dtype=np.float32))
