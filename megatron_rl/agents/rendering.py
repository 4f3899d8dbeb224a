"""Messages to the tokens that the engine is given, in the model's chat template.

A conversation is appended to: what the model drew stays as it was drawn, and only what follows a turn is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from megatron_rl.data.sample import Message
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.tasks.tokenizing import Tools, check_template, encode, template_text


class Renderer:
    """A chat template and a tokenizer.

    Args:
        params: the template's parameters, `chat_params` of the task.
    """

    def __init__(self, tokenizer: Tokenizer, params: Mapping[str, object]) -> None:
        check_template(tokenizer)
        self.tokenizer, self.params = tokenizer, params

    def first(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The prompt's tokens, with the beginning of the model's turn: those that a task's prompts have."""
        return encode([self._text(messages, tools)], self.tokenizer)[0]

    def following(self, messages: Sequence[Message], count: int, tools: Tools, ended: int | None) -> list[int]:
        """The tokens behind the policy's turn `messages[count - 1]`: the rest of the turn's own end, the
        messages from `count` on, and the beginning of the next turn.

        Args:
            ended: the drawn token that ended the turn, which is not written again; None: the turn was cut.
        """
        mark = _mark(messages)
        turn: Message = {"role": "assistant", "content": mark}
        marked = [*messages[: count - 1], turn, *messages[count:]]
        _, _, text = self._text(marked, tools).rpartition(mark)
        ids = encode([text], self.tokenizer)[0]
        return ids[1:] if ids[0] == ended else ids

    def _text(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = True) -> str:
        return template_text(self.tokenizer, messages, tools or None, self.params, add_generation_prompt)


def _mark(messages: Sequence[Message]) -> str:
    """A word that no message has."""
    written, number = json.dumps(messages, default=str), 0
    while (mark := f"TURN{number}ENDS") in written:
        number += 1
    return mark
