"""Encoding a chat template's text where a message has the text of a special token, without making it one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, cast

from megatron_rl.base.messages import errors_named
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.tasks.tokenizing import refuse_unknown

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Fast

# No tokenizer has tokens of private characters, and normalizers leave them alone.
_BEGIN, _END = "\ue000", "\ue001"


class PlainText:
    """A copy of a tokenizer in which some tokens have other names, so that their text is text like any other.

    The caller's tokenizer stays as it is: it is used by other threads.

    Args:
        tokens: texts of the added tokens that messages may not write.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Collection[str]) -> None:
        self._tokenizer, self._tokens = tokenizer, tuple(tokens)
        self._renamed: dict[str, Fast] = {}  # by what the names begin with

    def encode(self, text: str, words: Mapping[str, str]) -> list[int]:
        """Token ids of a text in which `words` stand for texts that are plain.

        Raises:
            ValueError: the tokenizer does not know a character, or is written in Python.
        """
        begin = _BEGIN
        while begin in text or any(begin in plain for plain in words.values()):
            begin += _BEGIN
        names = {token: f"{begin}{number}{_END}" for number, token in enumerate(self._tokens)}
        if begin not in self._renamed:
            self._renamed[begin] = self._rename(names)
        text = replace_words(replace_words(text, names), words)
        backend, tokens = self._backend, {name: token for token, name in names.items()}
        with errors_named(f"the tokenizer cannot encode {text!r:.200}", Exception):  # tokenizers raises bare Exceptions
            pieces = self._renamed[begin].encode(text, add_special_tokens=False).tokens
        # By their texts: other names have other ids, and move those of further tokens.
        ids = [cast(int, backend.token_to_id(tokens.get(piece, piece))) for piece in pieces]
        refuse_unknown(text, ids, self._tokenizer)
        return ids

    def _rename(self, names: Mapping[str, str]) -> Fast:
        from tokenizers import Tokenizer as Fast

        written = json.loads(self._backend.to_str())
        for token in written["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        written["post_processor"] = None  # it adds special tokens by their names
        return Fast.from_str(json.dumps(written))

    @property
    def _backend(self) -> Fast:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                "a message has the text of a special token, which only tokenizers with a tokenizer.json encode as text"
            )
        return backend


def replace_words(text: str, words: Mapping[str, str]) -> str:
    """The text with the longest word at each place replaced."""
    present = [word for word in words if word in text]
    if not present:
        return text
    longest_first = sorted(present, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda match: words[match[0]], text)
