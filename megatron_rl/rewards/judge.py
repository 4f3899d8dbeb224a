"""An LLM as a judge of reasoning, over any endpoint that speaks the OpenAI chat API (AWPO, appendix B.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.rewards.judge_prompt import messages, read_score, read_template
from megatron_rl.rewards.kinds import SampleMapping
from megatron_rl.rewards.registry import register_reward
from megatron_rl.rewards.remote import Nonsense, Policy, RemoteReward
from megatron_rl.runtime.http import ServerSettings, as_urls

DEFAULT_BODY = {"temperature": 0.0, "max_tokens": 2048}
_RESERVED = ("model", "messages", "stream", "n")


@register_reward("judge")
def judge(
    urls: Any,
    model: str,
    unanswered: str = "drop",
    neutral: float = 0.5,
    template: str | None = None,
    rationale_key: str = "rationale",
    body: Mapping[str, Any] | None = None,
    api_key_env: str | None = None,
    max_in_flight: int = 256,
    request_seconds: float = 60.0,
    step_seconds: float = 600.0,
    retries: int = 4,
    backoff_seconds: float = 0.5,
    max_requests_per_step: int | None = None,
    max_requests_per_run: int | None = None,
    max_tokens_per_step: int | None = None,
    max_tokens_per_run: int | None = None,
) -> RemoteReward:
    """One of the tiers 0, 0.25, 0.5, 0.75, 0.9, 1.0: a judge's grade of the reasoning and the tool calls.

    Args:
        urls: base URL, or a list of base URLs of equal servers, as OpenAI clients take them.
        model: the name under which the server has the judge.
        unanswered: a rollout without a grade has no value (`drop`), scores `neutral`, or stops the run (`stop`).
        neutral: that score.
        template: a file in place of the built-in prompt.
        rationale_key: the sample's metadata key with the reference rationale; a sample may lack it.
        body: further keys of the request, such as temperature or response_format; null: temperature 0, max_tokens 2048.
        api_key_env: NAME of the environment variable that holds the key.
        max_in_flight: requests at a time, over all ranks.
        request_seconds: longest time of one request.
        step_seconds: how long a step waits for grades once all its rollouts are there.
        retries: further requests after a failed one.
        backoff_seconds: wait before the first retry; doubles.
        max_requests_per_step: budget over all ranks, retries included; null: none.
        max_requests_per_run: the same for the run, restarts included.
        max_tokens_per_step: tokens read and written by the judge, as its server reports them.
        max_tokens_per_run: the same for the run.
    """
    text = read_template(template)
    extra = check_body(body, DEFAULT_BODY)
    check_name("model", model)
    check_name("rationale_key", rationale_key)

    def render(completion: str, sample: SampleMapping) -> dict[str, Any]:
        rationale = str((sample.get("metadata") or {}).get(rationale_key) or "")
        return {"model": model, "messages": messages(text, completion, sample, rationale), **extra}

    def read(reply: Mapping[str, Any]) -> tuple[float, str]:
        said = reply_text(reply)
        score = read_score(said)
        if score is None:
            raise Nonsense(said)
        return score, said

    return RemoteReward(
        ServerSettings(as_urls(urls), api_key_env, max_in_flight, request_seconds, retries, backoff_seconds),
        Policy(
            unanswered,
            neutral,
            step_seconds,
            max_requests_per_step,
            max_requests_per_run,
            max_tokens_per_step,
            max_tokens_per_run,
        ),
        "/chat/completions",
        render,
        read,
        has_message,
    )


def reply_text(reply: Mapping[str, Any]) -> str:
    """The content of a chat completion's first choice; raises Nonsense where that is no text."""
    content = reply["choices"][0]["message"].get("content")
    if not isinstance(content, str):
        raise Nonsense(f"no text in the message: {str(reply)[:500]}")
    return content


def has_message(reply: Mapping[str, Any]) -> bool:
    """Whether a reply is a chat completion: it has a choice with a message. One without is a fault of the server's."""
    try:
        return isinstance(reply["choices"][0]["message"], Mapping)
    except (LookupError, TypeError):
        return False


def check_body(body: Any, default: Mapping[str, Any]) -> dict[str, Any]:
    """The request's further keys. ValueError for what is no mapping, or sets what is not the recipe's to set there."""
    if body is None:
        return dict(default)
    if not isinstance(body, Mapping):
        raise ValueError(f"body = {body!r}, must be a mapping of request parameters")
    for key in _RESERVED:
        if key in body:
            raise ValueError(f"body.{key}: not here; {'use the parameter model' if key == 'model' else 'it is set'}")
    return dict(body)


def check_name(name: str, value: Any) -> None:
    """ValueError unless the value is some text."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} = {value!r}, must be a text that is not empty")
