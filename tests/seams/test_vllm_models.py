from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.seams.vllm_models import inspected_here


def test_a_class_is_looked_at_without_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's cache gets what vLLM itself writes into it, which a later start of any program reads."""
    from vllm.model_executor.models.registry import _SUBPROCESS_COMMAND, _LazyRegisteredModel

    run = subprocess.run

    def no_process(command: list[str], **how: Any) -> object:
        assert command != _SUBPROCESS_COMMAND, "was started"
        return run(command, **how)

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", no_process)
    model = _LazyRegisteredModel("vllm.model_executor.models.qwen3", "Qwen3ForCausalLM")
    with pytest.raises(AssertionError, match="was started"):
        model.inspect_model_cls()
    with inspected_here():
        seen = model.inspect_model_cls()
    assert (seen.architecture, seen.is_text_generation_model, seen.supports_pp) == ("Qwen3ForCausalLM", True, True)
    [kept] = (tmp_path / "modelinfos").iterdir()
    assert json.loads(kept.read_text())["modelinfo"] == json.loads(json.dumps(asdict(seen)))
    assert model.inspect_model_cls().architecture == seen.architecture  # from the cache
