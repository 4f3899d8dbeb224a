"""Guesses of a response's next tokens, by what its own text and the other rollouts of its prompt went on with before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Lengths of the last tokens that are looked up, the longest first: the longer they are, the likelier they go on alike.
_CONTEXTS = (12, 6, 3)
_REMEMBERED = 2**24  # tokens of earlier steps' rollouts


class Drafts:
    """Prompt-lookup decoding over a group and over steps.

    The last tokens of a response are looked up in its prompt, in itself, in the group's other rollouts and in those of the
    last step that had the prompt; the tokens after the latest place are the guess.
    """

    def __init__(self, tokens: int, below: int) -> None:
        """
        Args:
            tokens: of a guess, at most.
            below: nothing is guessed while more responses than these are drawn together.
        """
        self._tokens, self._below = tokens, below
        self._groups: dict[str, _Group] = {}  # by sample id
        self._requests: dict[str, tuple[_Group, _Text]] = {}
        self._earlier: dict[str, list[np.ndarray]] = {}  # int32 texts, by sample id; what was drawn last comes last
        self._counts = Counter[str]()

    def begin(self, request: str, name: tuple[str, int], tokens: Sequence[int]) -> None:
        """A request is added. `name`: sample id and index of its rollout; `tokens`: those that it continues."""
        sample_id, index = name
        if sample_id not in self._groups:
            self._groups[sample_id] = _Group(text.tolist() for text in self._earlier.get(sample_id, ()))
        group = self._groups[sample_id]
        self._requests[request] = group, group.begin(index, list(tokens))

    def guess(self, request: str, drawn: Sequence[int], together: int) -> list[int]:
        """The tokens after those that the request has `drawn` last; none where nothing like them came before, or where nobody
        has begun the request. `together`: requests that are drawn now."""
        if request not in self._requests:
            return []
        group, text = self._requests[request]
        text.tokens.extend(drawn)
        if together > self._below:
            return []
        self._counts["drawn_below"] += len(drawn)
        return group.continuation(text.tokens, self._tokens)

    def verified(self, drafted: int, accepted: int) -> None:
        """Counts guessed tokens, and those of them that were drawn."""
        self._counts.update(drafted=drafted, accepted=accepted)

    def end(self, request: str, drawn: int) -> None:
        """A request has ended, after so many tokens."""
        del self._requests[request]
        self._counts["drawn"] += drawn

    def take_counts(self) -> Counter[str]:
        """Tokens that were `drafted`, `accepted`, `drawn_below`, while responses were few enough for drafts, and, in requests
        that have ended, `drawn` since the last call."""
        counts, self._counts = self._counts, Counter()
        return counts

    def end_step(self) -> None:
        """New weights come: what was drawn until now is remembered as earlier rollouts of its prompts."""
        for sample_id, group in self._groups.items():
            self._earlier.pop(sample_id, None)
            self._earlier[sample_id] = [np.array(text.tokens, dtype=np.int32) for text in group.texts.values()]
        self._groups.clear()
        self._requests.clear()
        size = sum(text.size for texts in self._earlier.values() for text in texts)
        while size > _REMEMBERED:
            size -= sum(text.size for text in self._earlier.pop(next(iter(self._earlier))))


@dataclass
class _Text:
    """A rollout's tokens, prompt included; `indexed`: so many of them are in the group's index."""

    tokens: list[int]
    indexed: int = 0


class _Group:
    """The texts of a group's rollouts, and where their parts go on."""

    def __init__(self, earlier: Iterable[list[int]]) -> None:
        self.texts: dict[int, _Text] = {}  # by index of the rollout
        self._earlier = [_Text(tokens) for tokens in earlier]
        self._after: dict[tuple[int, ...], tuple[list[int], int]] = {}  # last tokens -> text and place where they go on

    def begin(self, index: int, tokens: list[int]) -> _Text:
        """Returns the text of a rollout's next request: the one before, where `tokens` continue it."""
        text = self.texts.get(index)
        if text is None or tokens[: len(text.tokens)] != text.tokens:
            text = self.texts[index] = _Text([])
        text.tokens.extend(tokens[len(text.tokens) :])
        return text

    def continuation(self, tokens: Sequence[int], most: int) -> list[int]:
        """Returns what came after the last of `tokens`, in the longest context that is known."""
        for text in (*self._earlier, *self.texts.values()):
            self._index(text)
        for context in _CONTEXTS:
            if len(tokens) >= context and (place := self._after.get(tuple(tokens[-context:]))) is not None:
                other, begin = place
                return other[begin : begin + most]
        return []

    def _index(self, text: _Text) -> None:
        for end in range(text.indexed, len(text.tokens)):
            for context in _CONTEXTS:
                if end >= context:
                    self._after[tuple(text.tokens[end - context : end])] = text.tokens, end
        text.indexed = len(text.tokens)
