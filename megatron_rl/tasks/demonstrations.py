"""Demonstrations for supervised fine-tuning: named writers of a target text per sample.

A writer gets the sample's id and its fields (the metadata, `prompt`, `answer`, `tool_calls`, and the answer under its
column's name), and returns the response text alone; the training adds the end-of-sequence token. Writers are
deterministic: the same sample always gets the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from megatron_rl.base.messages import unknown_name
from megatron_rl.base.typed_params import Params, check_params
from megatron_rl.config.keys import Share
from megatron_rl.tasks.tool_world import toolrl_response

Fields: TypeAlias = Mapping[str, Any]  # of a sample, by the keys of its source
Writer = Callable[[str, Fields], str]

COLUMN = "column:"


def chain_sum_working(expression: str) -> list[str]:
    """The steps of a sum from left to right: `1 + 3 - 5` gives `["1+3=4", "4-5=-1"]`.

    Args:
        expression: terms and the operators + and -, separated by blanks, as reasoning-gym's chain_sum writes them.
    """
    first, *rest = expression.split()
    total = int(first)
    steps = []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if operator == "+" else total - int(term)
        steps.append(f"{total}{operator}{term}={result}")
        total = result
    return steps


def _uniform(seed: int, sample_id: str) -> float:
    digest = hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def chain_sum_steps(share: Share = 0.4, seed: int = 0) -> Writer:
    """chain_sum's answers: a share of the samples shows the working, the rest only the answer.

    With working: `1+3=4 4-5=-1 -1-7=-8#-8`; without: `#-8`. Always correct.

    Args:
        share: expected share of samples with working, drawn per sample from its id and `seed`.
        seed: another seed draws another selection.
    """

    def write(sample_id: str, fields: Fields) -> str:
        if fields.get("source_dataset") != "chain_sum":
            raise ValueError("chain_sum_steps writes demonstrations for reasoning-gym's chain_sum only")
        steps = chain_sum_working(fields["expression"]) if _uniform(seed, sample_id) < share else []
        return f"{' '.join(steps)}#{fields['answer']}"

    return write


def tool_world(working: Share = 0.4, sloppy: Share = 0.0, seed: int = 0) -> Writer:
    """tool_world's answers, with the gold calls; a share of them shows the working, the rest has an empty `<think>`.

    Args:
        working: share of the samples whose `<think>` holds the rationale.
        sloppy: share of the samples whose calls or answer lack their tags. After a warm-up on these, RL still has to learn
            the form, as it has with a base model.
        seed: another seed draws other selections.
    """

    def write(sample_id: str, fields: Fields) -> str:
        if fields.get("source_dataset") != "tool_world":
            raise ValueError("the writer tool_world is for the source tool_world only")
        thought = fields["rationale"] if _uniform(seed, sample_id) < working else ""
        text = toolrl_response(thought, fields["tool_calls"], fields["answer"])
        if _uniform(seed, f"{sample_id}/sloppy") < sloppy:
            for tag in ("<tool_call>\n", "\n</tool_call>", "<response>", "</response>"):
                text = text.replace(tag, "")
        return text

    return write


WRITERS: dict[str, Callable[..., Writer]] = {"chain_sum_steps": chain_sum_steps, "tool_world": tool_world}


def _column(key: str) -> Writer:
    def write(sample_id: str, fields: Fields) -> str:
        text = fields.get(key)
        if not isinstance(text, str):
            raise ValueError(f"the column {key!r} must hold the demonstration's text, not {text!r:.80}")
        return text

    return write


def make_writer(name: str, params: Params) -> Writer:
    """The writer a task's `demonstrations` names: a registered one, or `column:<key>`, the text of one field.

    The fields are those of a file's row, or `answer` and the metadata of a generated puzzle.

    Raises:
        ValueError: unknown name or parameter (with the nearest), or a parameter out of range.
    """
    if name.startswith(COLUMN):
        if params:
            raise ValueError(f"{name!r} takes no demonstration_params, not {', '.join(params)}")
        return _column(name.removeprefix(COLUMN))
    if name not in WRITERS:
        raise ValueError(unknown_name("demonstrations", name, [*WRITERS, f"{COLUMN}<key>"]))
    check_params(WRITERS[name], params, name)
    return WRITERS[name](**params)
