"""The family of docs/families.md, from the page's own code: it computes, moves and is planned as a built-in one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.models import model_of, read_hf_config, registry
from megatron_rl.planning.memory import actor_parameters
from megatron_rl.weights.files import SafetensorsFolder
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import tiny
from .megatron import build, logits

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SIZES = {"head_dim": 16, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Gemma of transformers, with the page's family registered."""
    family, module = (ModuleType(name) for name in ("gemma", "megatron_rl.modules.gemma"))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    for target, code in zip((family, module), blocks, strict=True):
        exec(compile(code, str(PAGE), "exec"), vars(target))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, family.GEMMA))
    monkeypatch.setitem(tiny.VARIANTS, "gemma", ("GemmaConfig", SIZES))
    return tiny.write(tmp_path / "model", "gemma")


def test_the_pages_family_computes_what_transformers_computes(folder: Path, parallel: ParallelGroups) -> None:
    config = read_hf_config(folder)
    model = model_of(config)
    chunks = build(model.family, model.description, parallel)
    assert sum(p.numel() for p in chunks[0].parameters()) == actor_parameters(model).total
    load_hf_weights(chunks, model.family, config, folder, parallel)
    expected = tiny.hf_logits(folder)
    torch.testing.assert_close(logits(chunks[0], tiny.tokens()), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())
    source = SafetensorsFolder(folder)
    exported = dict(iter_hf_weights(chunks, model.family, config, parallel))
    assert exported.keys() == source.names()
    assert all(torch.equal(value, source.read(name, 0, 0, value.shape[0])) for name, value in exported.items())


def test_the_pages_family_goes_through_conversion_unchanged(folder: Path, tmp_path: Path) -> None:
    jobs.run(ToMegatron(folder, Layout(tensor=2, pipeline=2)), tmp_path / "megatron", 1, print)
    jobs.run(ToHF(tmp_path / "megatron", folder), tmp_path / "hf", 1, print)
    before, after = SafetensorsFolder(folder), SafetensorsFolder(tmp_path / "hf")
    assert before.names() == after.names()
    for name in before.names():
        rows = before.shape(name)[0]
        assert torch.equal(before.read(name, 0, 0, rows), after.read(name, 0, 0, rows)), name


def test_what_changes_gemmas_forward_pass_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="`hidden_act` = 'silu'"):
        model_of(read_hf_config(folder) | {"hidden_act": "silu"})
