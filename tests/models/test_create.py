"""Models made on the spot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_rl.config.model import CreateModelConfig
from megatron_rl.weights.create import create_model

CONFIG = CreateModelConfig(init_std=0.08)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        create_model(tmp_path / name, CONFIG, seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert sum(value.numel() for value in a.values()) == 312_064
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a if a[name].ndim == 2)
    for name, value in a.items():
        assert value.dtype == torch.float32
        if value.ndim == 1:
            assert (value == 1).all(), name
        else:
            assert value.std().item() == pytest.approx(0.08, rel=0.05), name
            assert abs(value.mean().item()) < 0.005, name


def test_the_tokenizer_is_one_token_per_character(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    create_model(tmp_path / "m", CONFIG, 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "1+3=4 4-5=-1#-1"
    ids = tokenizer(text)["input_ids"]
    assert ids == [2 + CONFIG.characters.index(character) for character in text]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 1, 0], skip_special_tokens=True) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert len(tokenizer) == CONFIG.vocab_size
    assert all(tokenizer.decode([number]) for number in range(CONFIG.vocab_size))
    assert GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == 1
    with pytest.raises(Exception, match="Missing"):  # a character that the model has no token for is no token at all
        tokenizer("x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10}, r"vocab_size` \(10\) must hold"),
        ({"characters": "0120"}, "repeats '0'"),
        ({"heads": 3}, r"heads` \(3\) must be a multiple"),
        ({"head_dim": 7}, r"head_dim` \(7\) must be even"),
        ({"layers": 0}, "layers` must be at least 1; it is 0"),
        ({"init_std": 0.0}, "init_std"),
    ],
)
def test_impossible_sizes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_model(tmp_path / "m", replace(CONFIG, **changes), 0)
    assert not list(tmp_path.iterdir())


def test_words_are_one_token_each_and_the_longest_counts(tmp_path: Path) -> None:
    words = ["<think>", "time", "timer", '": ', '"}}', "}}"]
    config = CreateModelConfig(characters='abcdeimnrt<>":}{ \n5', words=words, vocab_size=32)
    create_model(tmp_path / "model", config, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    text = '<think>timer time"min": 5}}\n"a"}}'
    pieces = ["<think>", "timer", " ", "time", '"', "m", "i", "n", '": ', "5", "}}", "\n", '"', "a", '"}}']
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("words", "message"),
    [(["a"], "no word"), (["ab", "ab"], "repeats 'ab'"), (["ab"] + [f"w{i}" for i in range(9)], "10 words")],
)
def test_words_that_are_none(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        create_model(tmp_path / "model", CreateModelConfig(characters="a", words=words, vocab_size=8), seed=0)
