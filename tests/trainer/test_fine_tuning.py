"""What the supervised steps learn from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_rl.config.schema import Config, CreateModelConfig
from megatron_rl.data import Sample
from megatron_rl.models import create_model
from megatron_rl.trainer.sft import demonstration_ids


def test_a_token_that_the_model_has_no_row_for_is_named(tmp_path: Path) -> None:
    """Added to the tokenizer, and not to the model; whose padded embedding may even have a row of zeros for it."""
    create_model(tmp_path / "model", CreateModelConfig(layers=1), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    actor = SimpleNamespace(vocab_shard=SimpleNamespace(vocab_size=len(tokenizer)))
    run: Any = SimpleNamespace(config=Config(run_dir="x"), tokenizer=tokenizer, actor=actor)
    sample = Sample("sums/3", "sums", "1+1=", tokenizer.encode("1+1="), demonstration="2=")
    [ids] = demonstration_ids(run, [sample])
    assert ids[-1] == tokenizer.eos_token_id
    tokenizer.add_tokens(["2="])
    message = rf"sums/3 has token '2=', number {len(tokenizer) - 1}, .* resize its embedding"
    with pytest.raises(ValueError, match=message):
        demonstration_ids(run, [sample])
