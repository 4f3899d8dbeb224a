"""Conversations over an engine of arithmetic: what is drawn, whatever waits, fails or hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents import talking

TEXTS = ["what is 1+1?", "say something.", "who are you?"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return talking.tokenizer(tmp_path_factory.mktemp("words"))


def test_smoke(words: Any, tmp_path: Path) -> None:
    config = talking.recipe("patient")
    prompts = talking.samples(tmp_path, config, words, TEXTS)
    with talking.hosted(config, words) as conversations:
        rollouts = talking.conversed(conversations, prompts)
    for row in sorted(rollouts.held):
        r = rollouts.held[row]
        print(repr(words.decode(r.tokens)), r.failed_by, r.agent_rewards, r.finish_reason)
    print(conversations.take_lost())
