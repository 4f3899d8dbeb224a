"""An LLM as a judge of reasoning, over any endpoint that speaks the OpenAI chat API (AWPO, appendix B.2)."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config.schema import ServerConfig
from megatron_rl.rewards.judge_prompt import messages, read_score, read_template
from megatron_rl.rewards.kinds import SampleMapping
from megatron_rl.rewards.registry import register_reward
from megatron_rl.rewards.remote import AnswerRules, Nonsense, RemoteReward, Reply

DEFAULT_BODY = {"temperature": 0.0, "max_tokens": 2048}
_RESERVED = ("model", "messages", "stream", "n")


@register_reward("judge", ServerConfig, AnswerRules)
def judge(
    server: ServerConfig,
    rules: AnswerRules,
    urls: str | list[str],
    model: str,
    template: str | None = None,
    rationale_key: str = "rationale",
    body: Mapping[str, object] | None = None,
) -> RemoteReward:
    """One of the tiers 0, 0.25, 0.5, 0.75, 0.9, 1.0: a judge's grade of the reasoning and the tool calls.

    Args:
        urls: base URL, or a list of base URLs of equal servers, as OpenAI clients take them.
        model: the name under which the server has the judge.
        template: a file in place of the built-in prompt.
        rationale_key: the sample's metadata key with the reference rationale; a sample may lack it.
        body: further keys of the request, such as temperature or response_format; null: temperature 0, max_tokens 2048.
    """
    text = read_template(template)
    extra = check_body(body, DEFAULT_BODY)
    for name, value in (("model", model), ("rationale_key", rationale_key)):
        if not value:
            raise ValueError(f"{name} = {value!r}, must be a text that is not empty")

    def render(completion: str, sample: SampleMapping) -> dict[str, object]:
        rationale = str((sample.get("metadata") or {}).get(rationale_key) or "")
        return {"model": model, "messages": messages(text, completion, sample, rationale), **extra}

    def read(reply: Reply) -> tuple[float, str]:
        said = reply_text(reply)
        score = read_score(said)
        if score is None:
            raise Nonsense(said)
        return score, said

    return RemoteReward(urls, server, rules, "/chat/completions", render, read, has_message)


def reply_text(reply: Reply) -> str:
    """The content of a chat completion's first choice; raises Nonsense where that is no text."""
    content = reply["choices"][0]["message"].get("content")
    if not isinstance(content, str):
        raise Nonsense(f"no text in the message: {str(reply)[:500]}")
    return content


def has_message(reply: Reply) -> bool:
    """Whether a reply is a chat completion: it has a choice with a message."""
    try:
        return isinstance(reply["choices"][0]["message"], Mapping)
    except (LookupError, TypeError):
        return False


def check_body(body: object, default: Mapping[str, object]) -> dict[str, object]:
    """The request's further keys. ValueError unless they are a mapping without the keys that the reward sets."""
    if body is None:
        return dict(default)
    if not isinstance(body, Mapping):
        raise ValueError(f"body = {body!r}, must be a mapping of request parameters")
    for key in _RESERVED:
        if key in body:
            raise ValueError(f"body.{key}: not here; {'use the parameter model' if key == 'model' else 'it is set'}")
    return dict(body)
