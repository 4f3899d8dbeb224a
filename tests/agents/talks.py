"""Rollouts of conversations about three texts, by agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.data.rollout import Rollouts
from tests.agents import talking

TEXTS = ["what is 1+1?", "say something.", "who are you?"]


class Talks:
    """Rollouts of `TEXTS`, by agent."""

    def __init__(self, folder: Path, words: Any) -> None:
        self.folder, self.words = folder, words

    def __call__(
        self, agent: str, count: int = 2, texts: Any = TEXTS, engine: Any = None, tokens: int = 60, **keys: Any
    ) -> Rollouts:
        config = talking.recipe(agent, **keys)
        prompts = talking.samples(self.folder, config, self.words, texts)
        with talking.hosted(config, self.words) as conversations:
            rollouts = talking.conversed(conversations, prompts, count, engine, tokens)
            self.lost = conversations.take_lost()
        return rollouts
