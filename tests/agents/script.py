"""A stranger's script: it knows OpenAI's client, an address and a key."""

from __future__ import annotations

import sys

import openai


def main(base_url: str, api_key: str, question: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages: list = [{"role": "user", "content": question}]
    for turn in range(3):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [said, {"role": "user", "content": f"{len(said.content or '')} and {turn}?"}]
    print(len(messages) - 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
