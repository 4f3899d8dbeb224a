"""python -m tests.agents.published FAMILY TOKENIZER [--template FILE] [--conversations N] [--add TOKEN ...] [--beside CONFIG]

Random conversations, as `test_random_conversations.py` has them, with a published tokenizer and chat template.
`FAMILY` is one of `families.py`, and says how its models write; `TOKENIZER` is a folder with tokenizer.json and
tokenizer_config.json. Prints how many conversations there were, with how many turns and drawn tokens, and the first
ones in which a trained token is not the drawn one, or a special token stands elsewhere than the template has it.

`--beside Qwen3RendererConfig`: what follows a turn is compared with what `renderers` makes of it (`renderers_oracle.py`), but
where that has the text of a special token, which `renderers` takes for one.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerFast

from megatron_rl.agents.ledger import LedgerError
from tests.agents.conversing import had
from tests.agents.families import FAMILIES
from tests.agents.test_random_conversations import check_structure, check_tokens
from tests.agents.test_renderers import compared, turns_of

_SHOWN = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--template", type=Path, help="instead of the folder's")
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--add", nargs="*", default=[], help="tokens that the folder's tokenizer lacks")
    parser.add_argument("--beside", metavar="CONFIG", help="a class of renderers, in .venv-agents/verifiers")
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
    counts, errors, beside = collections.Counter[str](), list[str](), list[dict[str, Any]]()
    for number in range(args.conversations):
        try:
            conversation = had(family, random.Random(f"{family.name} {number}"))
            check_tokens(conversation)
            check_structure(conversation)
            beside.extend(turns_of(conversation) if args.beside else ())
        except LedgerError as error:  # of a user's message behind a tool's result, for example
            if "the chat template refuses" not in str(error):
                raise
            counts["conversations refused by the template"] += 1
            continue
        except (AssertionError, ValueError) as error:
            errors.append(f"conversation {number}: {type(error).__name__}: {error}")
            continue
        counts["turns"] += len(conversation.turns)
        counts["calls"] += sum(bool(turn.message.get("tool_calls")) for turn in conversation.turns)
        counts["drawn tokens"] += sum(len(turn.ids) for turn in conversation.turns)
    if beside:
        with TemporaryDirectory() as folder:
            entries = compared({family.name: beside}, {family.name: (args.beside, ())}, Path(folder))[family.name]
        counts.update(
            f"{entry} as renderers" if isinstance(entry, str) else "other than renderers" for entry in entries
        )
        errors += [
            f"renderers: {entry[0]!r}, and ours: {entry[1]!r}" for entry in entries if not isinstance(entry, str)
        ]
    digest = hashlib.sha256(template.encode()).hexdigest()[:12]
    print(
        f"{family.name}: {len(published)} tokens, template {digest}, {args.conversations} conversations, {len(errors)} differ"
    )
    print(", ".join(f"{number} {name}" for name, number in counts.items()))
    print("\n".join(errors[:_SHOWN]))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
