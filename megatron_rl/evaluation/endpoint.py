"""Responses from a served model: vLLM's OpenAI-compatible completions, asked with token ids and answered with token ids.

The prompts are the very tokens that the colocated engine would get, and each request has the seed that the rollout would have
there, so a server of the same weights draws the same responses.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import EndpointConfig
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.sampling import Sampling, rollout_seed
from megatron_rl.runtime import fetch, http
from megatron_rl.runtime.calls import event_loop

_MODELS_SECONDS = 30.0


@dataclass(frozen=True)
class Server:
    """A served model: base URLs of equal servers, and the name it is served under."""

    urls: tuple[str, ...]
    name: str
    root: str = ""  # the model's path, as the first server reports it
    room: int | None = None  # tokens of the longest prompt and its response, likewise


@dataclass(frozen=True)
class FailedRequest:
    """A request that got no usable answer, and why."""

    sample_id: str
    index: int
    reason: str


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
            wanted = "--served-name chooses one" if name is None else f"not {name!r}"
            raise ValueError(f"{url} serves {', '.join(map(repr, models)) or 'no model'}; {wanted}")
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


def complete(
    server: Server,
    config: EndpointConfig,
    samples: Sequence[Sample],
    count: int,
    sampling: Sampling,
    seed: int,
    step: int,
    done: Callable[[bool], None] = lambda answered: None,
    there: Mapping[tuple[str, int], Rollout] | None = None,
    keep: Callable[[Rollout], None] = lambda rollout: None,
) -> tuple[list[Rollout], list[FailedRequest]]:
    """`count` responses to every sample, by sample, then index, without texts; and the requests that failed.

    Args:
        seed, step: as in `rollout_seed`.
        done: called for every request, with whether it was answered; from another thread.
        there: responses from an earlier attempt, by sample id and index.
        keep: called with every new response; from another thread, one at a time.

    Raises:
        EndpointError: the server refuses access, or does not know the model.
        ValueError: the server does not return token ids.
        OSError: what `keep` raised, on a full disk for example.
    """
    there = there or {}
    requests = [(sample, index) for sample in samples for index in range(count)]

    async def everything() -> list[Rollout | FailedRequest]:
        endpoint = http.Endpoint(server.urls, config, is_reply=lambda reply: bool(reply.get("choices")))

        async def one(sample: Sample, index: int) -> Rollout | FailedRequest:
            if (sample.id, index) in there:
                done(True)
                return there[sample.id, index]
            body = _body(server.name, sample, sampling, rollout_seed(seed, step, sample.id, index))
            try:
                rollout = _rollout(sample, index, await endpoint.post("/completions", body))
            except http.Unanswered as error:
                done(False)
                return FailedRequest(sample.id, index, str(error))
            keep(rollout)
            done(True)
            return rollout

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(sample, index)) for sample, index in requests]
        except* (http.EndpointError, ValueError, OSError) as errors:
            raise errors.exceptions[0] from None
        finally:
            await endpoint.close()
        return [task.result() for task in tasks]

    future = asyncio.run_coroutine_threadsafe(everything(), event_loop())
    try:
        answers = future.result()
    except BaseException:  # Ctrl-C: no request may outlive the command
        future.cancel()
        raise
    rollouts = [answer for answer in answers if isinstance(answer, Rollout)]
    return rollouts, [answer for answer in answers if isinstance(answer, FailedRequest)]


def _body(name: str, sample: Sample, sampling: Sampling, seed: int) -> dict[str, object]:
    """One request. It sets everything that the server would otherwise take from the model's generation_config.json."""
    body = {
        "model": name,
        "prompt": sample.prompt_ids,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        "return_token_ids": True,
    }
    return body | ({"seed": seed} if sampling.temperature > 0 else {})


def _rollout(sample: Sample, index: int, reply: dict[str, object]) -> Rollout:
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise http.Unanswered(f"the server ended the response with {reason!r}")
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list):
        raise ValueError(
            "the server does not return token ids (`return_token_ids`, vLLM 0.10.2 and later); text is never tokenised again"
        )
    if choice.get("prompt_token_ids", sample.prompt_ids) != sample.prompt_ids:
        raise ValueError(
            f"the server changed the prompt of {sample.id}: it answered {len(choice['prompt_token_ids'])} tokens"
        )
    return Rollout.single_turn(sample, index, tokens, reason)
