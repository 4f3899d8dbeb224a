"""python -m tests.agents.published FAMILY TOKENIZER [--template FILE] [--conversations N] [--add TOKEN ...] [--beside CONFIG]

Random conversations, as `test_random_conversations.py` has them, with a published tokenizer and chat template.
`FAMILY` is one of `families.py`, and says how its models write; `TOKENIZER` is a folder with tokenizer.json and
tokenizer_config.json. Prints how many conversations there were, with how many turns and drawn tokens, and the first
ones in which a trained token is not the drawn one, or a special token stands elsewhere than the template has it.

`--beside Qwen3RendererConfig`: each request is compared with what `renderers` (PyPI, in no requirements file) makes of the
tokens before it and the new messages. It renders some histories anew, and takes the text of a special token for one: these
are counted apart.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import importlib
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.agents.conversing import Conversation, had
from tests.agents.families import FAMILIES
from tests.agents.test_random_conversations import check_structure, check_tokens

_SHOWN = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--template", type=Path, help="instead of the folder's")
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--add", nargs="*", default=[], help="tokens that the folder's tokenizer lacks")
    parser.add_argument("--beside", metavar="CONFIG", help="a config of the package renderers")
    args = parser.parse_args()
    published = PreTrainedTokenizerFast.from_pretrained(str(args.tokenizer))
    template = str(published.chat_template) if args.template is None else args.template.read_text()
    known, vocabulary = FAMILIES[args.family], published.get_vocab()
    family = dataclasses.replace(
        known,
        template=template,
        folder=str(args.tokenizer),
        added=tuple(args.add),
        stops=tuple(token for token in known.stops if token in vocabulary),
        metaspace=False,
    )
    FAMILIES[args.family] = family
    counts, errors = collections.Counter[str](), list[str]()
    for number in range(args.conversations):
        try:
            conversation = had(family, random.Random(f"{family.name} {number}"))
            check_tokens(conversation)
            check_structure(conversation)
            counts.update(_beside(args.beside, conversation) if args.beside else ())
        except (AssertionError, ValueError) as error:
            errors.append(f"conversation {number}: {type(error).__name__}: {error}")
            continue
        counts["turns"] += len(conversation.turns)
        counts["calls"] += sum(bool(turn.message.get("tool_calls")) for turn in conversation.turns)
        counts["drawn tokens"] += sum(len(turn.ids) for turn in conversation.turns)
    digest = hashlib.sha256(template.encode()).hexdigest()[:12]
    print(
        f"{family.name}: {len(published)} tokens, template {digest}, {args.conversations} conversations, {len(errors)} differ"
    )
    print(", ".join(f"{number} {name}" for name, number in counts.items()))
    print("\n".join(errors[:_SHOWN]))
    return 1 if errors else 0


def _beside(config: str, conversation: Conversation) -> Iterator[str]:
    """Yields how each request compares. AssertionError where one differs that should not."""
    other, messages, requests = _other(config, conversation.tokenizer), conversation.messages, conversation.requests
    places = [*(i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages)]
    tools = conversation.sample.metadata.get("tools")
    texts = (*conversation.family.special, *conversation.family.added)
    for number, turn in enumerate(conversation.turns):
        new = messages[places[number] + 1 : places[number + 1]]
        theirs = other.bridge_to_next_turn(requests[number], turn.ids, new, tools=tools)
        if theirs is None:
            yield "rendered anew by renderers"
        elif any(text in str(message["content"]) for text in texts for message in new):
            yield "with a token's text"
        else:
            ours = requests[number + 1]
            same = list(theirs.token_ids) == ours
            decode = conversation.tokenizer.decode
            at = len(requests[number])
            assert same, f"renderers: {decode(list(theirs.token_ids)[at:])!r}, and ours: {decode(ours[at:])!r}"
            yield "as renderers"


@cache
def _other(config: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    renderers = importlib.import_module("renderers")
    return renderers.create_renderer(tokenizer, getattr(renderers, config)(thinking_retention="all"))


if __name__ == "__main__":
    sys.exit(main())
