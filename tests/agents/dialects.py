"""Agents that speak the other dialects with their official clients, and say the same as `talking.patient` does in chats."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx2

Say = Callable[[Any, Any, list[Any]], Awaitable[tuple[str, list[Any]]]]
"""(model, task, conversation so far) -> (what the policy said, the conversation with it), in a dialect's own form."""


def claude(model: Any, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's client of a session, over the transport of the client that the agent was given."""
    address = str(model.base_url).removesuffix("/").removesuffix("/v1")
    return anthropic.AsyncAnthropic(
        base_url=address, api_key=model.api_key, http_client=model._client, max_retries=0, **options
    )


async def chat(model: Any, task: Any, said: list[Any]) -> tuple[str, list[Any]]:
    answer = await model.chat.completions.create(model="policy", messages=said)
    message = answer.choices[0].message
    return message.content, [*said, message.to_dict()]


async def chat_streamed(model: Any, task: Any, said: list[Any]) -> tuple[str, list[Any]]:
    async with model.chat.completions.stream(
        model="policy", messages=said, stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        whole = stream.current_completion_snapshot  # `get_final_completion` refuses what was cut
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    message = whole.choices[0].message
    return message.content, [*said, {"role": "assistant", "content": message.content}]


async def responses(model: Any, task: Any, said: list[Any]) -> tuple[str, list[Any]]:
    answer = await model.responses.create(model="policy", input=said)
    return answer.output_text, [*said, *(item.to_dict() for item in answer.output)]


async def responses_streamed(model: Any, task: Any, said: list[Any]) -> tuple[str, list[Any]]:
    came = [event async for event in await model.responses.create(model="policy", input=said, stream=True)]
    whole = came[-1].response
    assert [event.sequence_number for event in came] == [*range(len(came))]
    assert (came[0].type, came[-1].type) == ("response.created", f"response.{whole.status}")
    return whole.output_text, [*said, *(item.to_dict() for item in whole.output)]


async def messages(model: Any, task: Any, said: list[Any]) -> tuple[str, list[Any]]:
    answer = await claude(model).messages.create(model="policy", max_tokens=1000, messages=said)
    text = "".join(block.text for block in answer.content if block.type == "text")
    return text, [*said, {"role": "assistant", "content": [block.to_dict() for block in answer.content]}]


async def messages_streamed(model: Any, task: Any, said: list[Any]) -> tuple[str, list[Any]]:
    async with claude(model).messages.stream(model="policy", max_tokens=1000, messages=said) as stream:
        whole = await stream.get_final_message()
    text = "".join(block.text for block in whole.content if block.type == "text")
    return text, [*said, {"role": "assistant", "content": [block.to_dict() for block in whole.content]}]


SAY: dict[str, Say] = {
    "chat": chat,
    "chat_streamed": chat_streamed,
    "responses": responses,
    "responses_streamed": responses_streamed,
    "messages": messages,
    "messages_streamed": messages_streamed,
}


def speaking(dialect: str, turns: int = 3) -> Any:
    """What `talking.patient` says, in another dialect; `mixed` takes another one each turn."""

    async def run(model: Any, task: Any) -> dict[str, float]:
        said, text = list(task["prompt"]), ""
        names = list(SAY) if dialect == "mixed" else [dialect]
        for turn in range(turns):
            text, said = await SAY[names[turn % len(names)]](model, task, said)
            if dialect == "mixed":
                said = [*said[: len(said) - 1], {"role": "assistant", "content": text}]
            said.append({"role": "user", "content": f"{len(text)} and {turn}?"})
        return {"reward": 2.0 * turns, "letters": float(len(text)), "seed": float(task["seed"] % 1000)}

    return run


def remembering(turns: int = 3) -> Any:
    """Names the reply before in the place of the conversation up to it."""

    async def run(model: Any, task: Any) -> dict[str, float]:
        asked: Any = [*task["prompt"]]
        before, text = None, ""
        for turn in range(turns):
            answer = await model.responses.create(model="policy", input=asked, previous_response_id=before)
            before, text = answer.id, answer.output_text
            asked = f"{len(text)} and {turn}?"
        return {"reward": 2.0 * turns, "letters": float(len(text)), "seed": float(task["seed"] % 1000)}

    return run


def by_tokens(turns: int = 3) -> Any:
    """Tokenises by itself, and sends tokens; keeps what it was given and what it got."""

    async def run(model: Any, task: Any) -> dict[str, float]:
        from tests.agents.talking import CHARACTERS

        def encode(text: str) -> list[int]:
            return [2 + CHARACTERS.index(character) for character in text]

        ids, text = [*encode(f"u:{task['prompt'][0]['content']}"), 1, *encode("\na:")], ""
        for turn in range(turns):
            choice, prompt = await generate(model, ids)
            assert prompt == ids
            drawn = choice["token_ids"]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert logprobs == [-1.0 / (1 + token) for token in drawn]
            text = "".join(CHARACTERS[token - 2] for token in drawn if token > 1)
            cut = [] if choice["finish_reason"] == "stop" else [1]
            ids = [*ids, *drawn, *cut, *encode(f"\nu:{len(text)} and {turn}?"), 1, *encode("\na:")]
        return {"reward": 2.0 * turns, "letters": float(len(text)), "seed": float(task["seed"] % 1000)}

    return run


async def generate(model: Any, ids: list[int], **sampling: Any) -> tuple[dict[str, Any], list[int]]:
    """A turn by tokens: its choice, and the prompt's tokens."""
    address = str(model.base_url).removesuffix("/").removesuffix("/v1")
    wanted = {"logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [1], **sampling}
    answer = await model.post(
        f"{address}/inference/v1/generate",
        cast_to=httpx2.Response,
        body={"model": "policy", "token_ids": ids, "sampling_params": wanted, "return_token_ids": True},
    )
    body = json.loads(answer.content)
    return body["choices"][0], body["prompt_token_ids"]
