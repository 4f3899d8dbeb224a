"""The short way through a decoding step, and drafts, draw what vLLM's own way draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models.tiny import write

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def drawn(model: Path, way: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("decoding.py")), str(model), way]
    done = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.engine
def test_the_short_way_and_drafts_draw_the_same(tmp_path: Path) -> None:
    """Requests of odd lengths that come late, wait, are put back where the cache is full, and are aborted."""
    model = write(tmp_path / "model", "qwen3", head_dim=32)
    short, plain = drawn(model, "short"), drawn(model, "plain")
    assert plain["short"] == 0
    assert short["short"] > short["steps"] / 3, "most steps go another way"
    assert short["preempted"] == plain["preempted"] > 0
    assert short["steps"] == plain["steps"]
    assert len(plain["drawn"]) == 29, "one was aborted"
    assert {reason for _, _, reason, _ in plain["drawn"].values()} == {"stop", "length"}
    assert short["drawn"] == plain["drawn"]
    drafts = drawn(model, "drafts")
    assert drafts["drafted"] > drafts["accepted"] > 0
    assert drafts["steps"] < plain["steps"]
    tokens = sum(len(ids) for ids, *_ in drafts["drawn"].values())
    # All are few enough. One was aborted; near the longest text vLLM asks for no drafts.
    assert drafts["drawn_below"] == pytest.approx(tokens, rel=0.1)
    for name, wanted in plain["drawn"].items():
        assert drafts["drawn"][name] == wanted, name
