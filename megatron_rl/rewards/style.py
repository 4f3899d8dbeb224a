"""How a response's length and markdown differ from those of a baseline's answer: the style features of Arena-Hard 2.0."""

from __future__ import annotations

import re

from megatron_rl.rewards.kinds import InlineReward, SampleMapping
from megatron_rl.rewards.pairwise import baseline_of
from megatron_rl.rewards.registry import register_reward

_BLOCK = re.compile(r"```[^`]*```")
_ELEMENTS = {
    "headers": re.compile(r"^#{1,6}\s", re.MULTILINE),
    "lists": re.compile(r"^\s*(?:\d+\.|[-*+])\s", re.MULTILINE),
    "bold": re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__"),
}
COLUMNS = ("length", *_ELEMENTS)


def difference(own: str, other: str) -> dict[str, float]:
    """`length` is (a - b) / (a + b) of the two lengths, the others (a - b) / (a + b + 1) of elements per length; code blocks
    have no elements. Their lengths are tokens of GPT-4o's encoding, which has to be downloaded; these are characters."""
    lengths = len(own), len(other)
    found = {"length": (lengths[0] - lengths[1]) / max(1, sum(lengths))}
    prose = [_BLOCK.sub("", text) for text in (own, other)]
    for name, element in _ELEMENTS.items():
        a, b = (len(element.findall(text)) / max(1, length) for text, length in zip(prose, lengths, strict=True))
        found[name] = (a - b) / (a + b + 1)
    return found


@register_reward("style")
def style(baseline_key: str = "baseline") -> InlineReward:
    """How the response's style differs from that of the baseline's answer: four columns, 0 for the same.

    Args:
        baseline_key: the sample's metadata key with the baseline's answer.
    """

    def score(completion: str, sample: SampleMapping) -> dict[str, float]:
        return difference(completion, baseline_of(sample, baseline_key))

    return InlineReward(score, columns=COLUMNS, check_sample=lambda sample: baseline_of(sample, baseline_key))
