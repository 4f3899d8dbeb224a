"""A stranger's script: it knows a provider's client, an address and a key."""

from __future__ import annotations

import sys
from typing import Any

# A client of each is half a second of a process's beginning.


def chat(base_url: str, api_key: str, messages: list[Any]) -> str:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    assert [model.id for model in client.models.list()] == ["policy"]
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""


def responses(base_url: str, api_key: str, messages: list[Any]) -> str:
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    *_, last = client.responses.create(model="policy", input=messages, stream=True)
    return last.response.output_text


def claude(base_url: str, api_key: str, messages: list[Any]) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    with client.messages.stream(model="policy", max_tokens=1000, messages=messages) as stream:
        return stream.get_final_text()


SPEAK = {"chat": chat, "responses": responses, "claude": claude}


def main(base_url: str, api_key: str, question: str, dialect: str = "chat") -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(3):
        said = SPEAK[dialect](base_url, api_key, messages)
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"{len(said)} and {turn}?"},
        ]
    if dialect == "chat":
        print(len(messages) - 1)
    else:
        import httpx2

        reward = {"reward": len(messages) - 1}
        answer = httpx2.post(f"{base_url}/reward", json=reward, headers={"authorization": f"Bearer {api_key}"})
        answer.raise_for_status()


if __name__ == "__main__":
    main(*sys.argv[1:])
