from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def character_tokenizer(characters: str, **kwargs: str) -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "<eos>", *kwargs.values(), *characters]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, **kwargs))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", **kwargs)


@pytest.fixture(scope="session")
def digits() -> PreTrainedTokenizerFast:
    """Knows what the sums of the quick start are written with, and nothing else."""
    return character_tokenizer("0123456789+-*/=#.,() ")


@pytest.fixture(scope="session")
def printable() -> PreTrainedTokenizerFast:
    """All of printable ASCII, newline, and a chat template."""
    tokenizer = character_tokenizer("\n" + "".join(map(chr, range(32, 127))))
    tokenizer.chat_template = TEMPLATE
    return tokenizer
