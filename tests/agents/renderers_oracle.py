"""What the package `renderers` makes of turns and of what follows them, beside what ours sent; run by a Python that has it.

Standard input: JSON, a list of `tokenizer` (a folder), `added` (tokens that `renderers` asks for and the folder lacks),
`config` (a class of `renderers`), and `turns`, each with `before` (tokens of its request), `drawn` (its tokens), `messages`
(that follow it), `tools`, `after` (tokens of the next request). Prints JSON: for each of the list, an entry per turn.

same:   the tokens of the next request are those of `renderers`
closed: they are but for a `</think>`, which `renderers` puts behind a turn that was cut while it thought
anew:   `renderers` wants to render the whole history again
a pair: the two texts, which differ
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import renderers
from transformers import PreTrainedTokenizerFast


def compared(family: Mapping[str, Any]) -> list[str | list[str]]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(family["tokenizer"])
    tokenizer.add_tokens(family["added"])
    renderer = renderers.create_renderer(tokenizer, getattr(renderers, family["config"])(thinking_retention="all"))
    end_of_thought = tokenizer.convert_tokens_to_ids("</think>")
    entries: list[str | list[str]] = []
    for turn in family["turns"]:
        rendered = renderer.bridge_to_next_turn(turn["before"], turn["drawn"], turn["messages"], tools=turn["tools"])
        if rendered is None:
            entries.append("anew")
            continue
        theirs, ours, size = list(rendered.token_ids), turn["after"], len(turn["before"]) + len(turn["drawn"])
        if theirs == ours:
            entries.append("same")
        elif theirs == [*ours[:size], end_of_thought, *ours[size:]]:
            entries.append("closed")
        else:
            entries.append([tokenizer.decode(ids[len(turn["before"]) :]) for ids in (theirs, ours)])
    return entries


if __name__ == "__main__":
    json.dump([compared(family) for family in json.load(sys.stdin)], sys.stdout)
