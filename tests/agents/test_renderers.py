"""Random conversations beside the package `renderers`, a second implementation of what follows a turn."""

from __future__ import annotations

import collections
import json
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.agents.guest import interpreter
from tests.agents.conversing import Conversation, had
from tests.agents.families import FAMILIES, tokenizer_of

ORACLE = Path(__file__).with_name("renderers_oracle.py")
COUNT = 60
# Our family -> its class of `renderers`, and tokens that it asks for in a vocabulary. GPT-OSS's asks the network for a file,
# GLM-4.5's and DeepSeek-V3's write other things behind turns that were cut, and the other families have none.
COMPARED: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen3": ("Qwen3RendererConfig", ()),
    "qwen3.5": ("Qwen35RendererConfig", ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")),
    "llama3.1": ("Llama3RendererConfig", ("<|end_of_text|>",)),
}


def turns_of(conversation: Conversation) -> Iterator[dict[str, Any]]:
    """Yields the turns whose followers have no text of a special token, which `renderers` takes for the token."""
    messages, requests = conversation.messages, conversation.requests
    places = [*(i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages)]
    texts = (*conversation.family.special, *conversation.family.added)
    for number, turn in enumerate(conversation.turns):
        new = messages[places[number] + 1 : places[number + 1]]
        if not any(text in str(message["content"]) for text in texts for message in new):
            tools = conversation.sample.metadata.get("tools")
            yield {"before": requests[number], "drawn": turn.ids, "messages": new, "tools": tools} | {
                "after": requests[number + 1]
            }


def compared(
    turns: dict[str, list[dict[str, Any]]], classes: Mapping[str, tuple[str, Sequence[str]]], folder: Path
) -> dict[str, list[str | list[str]]]:
    """Asks the oracle about the turns of each family; returns its entries."""
    families = []
    for name, of_family in turns.items():
        config, added = classes[name]
        tokenizer_of(name).save_pretrained(folder / name)
        families.append({"tokenizer": str(folder / name), "added": added, "config": config, "turns": of_family})
    command = [str(interpreter("verifiers")), str(ORACLE)]
    done = subprocess.run(command, input=json.dumps(families), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(turns, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def turns() -> dict[str, list[dict[str, Any]]]:
    """Draws random conversations; the last turn of each family is its first once more, with a token too many."""
    drawn = {
        name: [turn for n in range(COUNT) for turn in turns_of(had(FAMILIES[name], random.Random(f"{name} {n}")))]
        for name in COMPARED
    }
    return {
        name: [*of_family, of_family[0] | {"after": [*of_family[0]["after"], 5]}] for name, of_family in drawn.items()
    }


@pytest.fixture(scope="module")
def entries(turns: dict[str, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return compared(turns, COMPARED, tmp_path_factory.mktemp("renderers"))


@pytest.mark.parametrize("name", COMPARED)
def test_what_follows_a_turn_is_what_renderers_writes(entries: dict[str, list[Any]], name: str) -> None:
    *of_conversations, of_damaged = entries[name]
    assert [entry for entry in of_conversations if not isinstance(entry, str)] == []
    counts = collections.Counter(of_conversations)
    assert counts["same"] >= 25
    assert counts["same"] > 3 * (counts["closed"] + counts["anew"])
    assert isinstance(of_damaged, list), "a token too many was not seen"
