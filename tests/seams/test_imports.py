"""What libraries import that no run uses is left out, and comes when it is wanted after all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.seams import torch_compile

WITHOUT_COMPILER = """
import sys
from pathlib import Path
from megatron_rl.rollout import environment
from megatron_rl.seams import torch_compile
environment.prepare()
torch_compile.leave_out()
import megatron.core.models.gpt
assert "torch._inductor" not in sys.modules
with torch_compile.left_out_of_vllm():
    import vllm.entrypoints.llm
from vllm.v1.worker import cpu_worker
assert "torch._inductor.compile_fx" not in sys.modules
import torch._inductor.lowering  # from here on
assert torch._inductor.lowering.lowerings
"""
WITHOUT_MATPLOTLIB = """
import sys
from pathlib import Path
from megatron_rl.seams import reasoning_gym
gym = reasoning_gym.load()
assert {"cellpylib", "matplotlib"}.isdisjoint(sys.modules)
items = [gym.create_dataset(name, seed=1, size=1)[0] for name in ("game_of_life", "game_of_life_halting")]
assert all(item["answer"] for item in items)
import cellpylib
assert cellpylib.evolve is sys.modules["reasoning_gym.algorithmic.game_of_life"].cpl.evolve
"""


@pytest.mark.parametrize("script", [WITHOUT_COMPILER, WITHOUT_MATPLOTLIB], ids=["compiler", "matplotlib"])
def test_a_process_runs_without_them(script: str) -> None:
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_compile_stays_where_it_is_on_and_returns_functions_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", compiler)  # undone at the end
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    torch_compile.leave_out()
    assert torch.compile is compiler
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    torch_compile.leave_out()
    assert torch.compile(len) is len
    assert torch.compile(dynamic=True)(len) is len


def test_kernels_for_cpus_without_avx512_are_had_by_a_folder_in_the_path() -> None:
    """`make test-other-cpus` would otherwise run what `make test` runs: vLLM asks these three, and torch a variable."""
    asked = (
        "torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported(), torch.backends.cpu.get_cpu_capability()"
    )
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1] / "other_cpu"),
        "ATEN_CPU_CAPABILITY": "default",
    }
    command = [sys.executable, "-c", f"import torch; print({asked})"]
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    assert found == "False False DEFAULT\n"
