"""The part of a Hugging Face tokenizer's interface that is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

if TYPE_CHECKING:
    import numpy as np


Ids: TypeAlias = "Sequence[int] | np.ndarray"


class Tokenizer(Protocol):
    chat_template: str | None
    eos_token_id: int
    pad_token_id: int | None
    unk_token_id: int | None
    unk_token: str  # where there is an `unk_token_id`

    @overload
    def __call__(self, text: str, **options: bool) -> Mapping[str, list[int]]: ...

    @overload
    def __call__(self, text: list[str], **options: bool) -> Mapping[str, list[list[int]]]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def decode(self, token_ids: Ids, **options: bool) -> str: ...

    def batch_decode(self, sequences: Sequence[Ids], **options: bool) -> list[str]: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, object]], **options: object) -> Any: ...
