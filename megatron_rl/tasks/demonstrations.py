"""Demonstrations for supervised fine-tuning: named writers of a target per sample.

A writer gets the sample's id and its fields (the metadata, `prompt`, `answer`, `tool_calls`, and the answer under its
column's name), and returns the response text alone; the training adds the end-of-sequence token. Or the conversation that
follows the prompt, as messages: the training is on the assistant's, whose content is all that the policy writes. Writers are
deterministic: the same sample always gets the same demonstration.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from megatron_rl.base.messages import unknown_name
from megatron_rl.base.typed_params import Params, check_params
from megatron_rl.config.keys import Share
from megatron_rl.data.sample import Call, Demonstration, Message
from megatron_rl.rewards.tool_parsers import CLOSE, OPEN
from megatron_rl.tasks.tool_house import ToolHouse
from megatron_rl.tasks.tool_world import toolrl_response

Fields: TypeAlias = Mapping[str, Any]  # of a sample, by the keys of its source
Writer = Callable[[str, Fields], Demonstration]

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


def tool_house(shortcut: Share = 0.0, seed: int = 0) -> Writer:
    """tool_house's conversations, with calls as Qwen's chat templates write them; a share of them does not read the code.

    Args:
        shortcut: share of the samples that give a code out of the air once they know the room, and so nearly always fail. The
            turns before are right. After a warm-up on these, RL still has to learn that looking pays.
        seed: another seed draws another selection.
    """

    def write(sample_id: str, fields: Fields) -> list[Message]:
        if fields.get("source_dataset") != "tool_house":
            raise ValueError("the writer tool_house is for the source tool_house only")
        calls, answer = list(fields["tool_calls"]), fields["answer"]
        if _uniform(seed, sample_id) < shortcut:
            codes = sorted(fields["house"]["read"].values())
            lowest = 10 ** (len(str(codes[0])) - 1)
            code = lowest + int(9 * lowest * _uniform(seed, f"{sample_id}/code"))
            calls = [call for call in calls if call["name"] != "read"]
            if calls[-1]["name"] == "open":
                calls[-1] = {"name": "open", "parameters": {**calls[-1]["parameters"], "code": code}}
            else:
                answer = f"code {code}"
        house, said = ToolHouse(), list[Message]()
        house.reset({"metadata": fields, "tools": []})
        for call in calls:
            said.append({"role": "assistant", "content": hermes_call(call)})
            said.append({"role": "tool", "content": house.call(call["name"], call["parameters"])})
        return [*said, {"role": "assistant", "content": answer}]

    return write


def python_maths(guesses: Share = 0.0, seed: int = 0) -> Writer:
    """python_maths's conversations, with calls as Qwen's chat templates write them; a share of them does not call.

    Args:
        guesses: share of the samples that give a number of the answer's length out of the air, and so nearly always fail.
            After a warm-up on these, RL still has to learn that the tool pays.
        seed: another seed draws another selection.
    """

    def write(sample_id: str, fields: Fields) -> list[Message]:
        if fields.get("source_dataset") != "python_maths":
            raise ValueError("the writer python_maths is for the source python_maths only")
        answer = str(fields["answer"])
        if _uniform(seed, sample_id) < guesses:
            digits = random.Random(f"{seed}/{sample_id}")
            return [{"role": "assistant", "content": re.sub(r"\d", lambda _: str(digits.randint(1, 9)), answer)}]
        [call] = fields["tool_calls"]
        called: Message = {"role": "assistant", "content": hermes_call(call)}
        return [called, {"role": "tool", "content": answer}, {"role": "assistant", "content": answer}]

    return write


def hermes_call(call: Call) -> str:
    """A call as Qwen's chat templates write it."""
    arguments = {"name": call["name"], "arguments": call["parameters"]}
    return f"{OPEN}\n{json.dumps(arguments, ensure_ascii=False)}\n{CLOSE}"


WRITERS: dict[str, Callable[..., Writer]] = {
    "chain_sum_steps": chain_sum_steps,
    "python_maths": python_maths,
    "tool_house": tool_house,
    "tool_world": tool_world,
}


def _column(key: str) -> Writer:
    def write(sample_id: str, fields: Fields) -> str | list[Message]:
        shown = fields.get(key)
        if isinstance(shown, list) and all(isinstance(message, dict) and "role" in message for message in shown):
            return cast(list[Message], shown)
        if not isinstance(shown, str):
            raise ValueError(
                f"the column {key!r} must hold the demonstration's text, or the messages behind the prompt, not {shown!r:.80}"
            )
        return shown

    return write


def make_writer(name: str, params: Params) -> Writer:
    """The writer a task's `demonstrations` names: a registered one, or `column:<key>`, the text or messages of one field.

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
