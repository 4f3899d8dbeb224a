"""Where compiled kernels are kept, and the programs that compile them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.runtime import compilers, cudnn, provenance
from megatron_rl.runtime.attempts import free_port, rank_environment


def program(folder: Path, name: str, said: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{said}'\n")
    (folder / name).chmod(0o755)
    return folder / name


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this test alone; no cache is named."""
    monkeypatch.setattr(compilers.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in (compilers.CACHE, *compilers.CACHES):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_caches_are_on_the_nodes_own_disk_unless_the_user_names_others(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = temporary / f"megatron_rl-{os.getuid()}"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    found = rank_environment(gpus=8)
    assert found["VLLM_CACHE_ROOT"] == str(own / "cache" / "vllm")
    assert {name for name in compilers.CACHES if name in found} == compilers.CACHES.keys() - {"TRITON_CACHE_DIR"}
    assert own.stat().st_mode & 0o777 == 0o700
    assert not any(name in rank_environment(gpus=0) for name in compilers.CACHES), "nothing is compiled on a CPU"
    monkeypatch.setenv(compilers.CACHE, "/local/me")
    assert rank_environment(gpus=8)["FLASHINFER_WORKSPACE_BASE"] == "/local/me/flashinfer"


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP would take all cores for `OMP_NUM_THREADS=`."""
    for value, expected in (("", "1"), ("2", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert rank_environment(gpus=0).get("OMP_NUM_THREADS") == expected


def test_vllm_and_torch_read_these_names(temporary: Path) -> None:
    """Of the libraries that are installed here; FlashInfer's, tilelang's and DeepGEMM's are in their CUDA builds only."""
    script = (
        "import vllm.envs, torch._inductor.runtime.cache_dir_utils as inductor;"
        "print(vllm.envs.VLLM_CACHE_ROOT, inductor.cache_dir(), inductor.triton_cache_dir(0))"
    )
    environment = {**os.environ, **rank_environment(gpus=1), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    cache = temporary / f"megatron_rl-{os.getuid()}" / "cache"
    assert said.stdout.split() == [str(cache / name) for name in ("vllm", "inductor", "triton")]


def test_a_cache_that_others_may_write_to_is_refused(temporary: Path) -> None:
    """Whoever makes the folder first could leave programs there."""
    own = temporary / f"megatron_rl-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{own}, .* MEGATRON_RL_CACHE=FOLDER"):
        rank_environment(gpus=1)
    own.rmdir()
    (temporary / "theirs").mkdir()
    own.symlink_to(temporary / "theirs")
    with pytest.raises(ConfigError):
        rank_environment(gpus=1)


def test_the_environments_own_programs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.venv/bin/megatron-rl` by its path, with a PATH that knows nothing of .venv: vLLM then went without FlashInfer."""
    python, ninja = program(tmp_path / "bin", "python"), program(tmp_path / "bin", "ninja")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for gpus in (0, 1):
        found = rank_environment(gpus)["PATH"]
        assert compilers.programs({"PATH": found})["ninja"] == str(ninja)
    monkeypatch.setenv("PATH", found)
    assert rank_environment(gpus=0)["PATH"] == found, "once"


def test_nvcc_is_the_one_that_would_be_called(tmp_path: Path) -> None:
    first = program(tmp_path / "cuda" / "bin", "nvcc", "Cuda compilation tools, release 12.8, V12.8.93")
    second = program(tmp_path / "bin", "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    assert compilers.nvcc({"PATH": str(tmp_path / "bin")}) == str(second)
    home = {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")}
    assert compilers.nvcc(home) == str(first)
    assert compilers.nvcc({**home, "CUDA_HOME": "/nowhere"}) is None
    assert [compilers.nvcc_version(str(path)) for path in (first, second)] == [(12, 8), (13, 0)]
    assert compilers.nvcc_version(str(program(tmp_path, "broken"))) is None


def test_a_run_writes_down_what_it_would_compile_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ninja = program(tmp_path, "ninja")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/x")
    about = provenance.surroundings()
    assert about["programs"]["ninja"] == str(ninja)  # type: ignore[index]
    assert about["environment"]["TORCHINDUCTOR_CACHE_DIR"] == "/x"  # type: ignore[index]


def test_what_is_written_down_of_a_run_waits_for_no_program_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(provenance, "_ANSWER", 0.5)
    begin = time.monotonic()
    assert provenance.gpus() == []
    assert time.monotonic() - begin < 20


# A fork per case: the imports before are the same, and it ends where Transformer Engine is first asked for.
INITIALIZE = """
import json, os, sys
from megatron_rl.config.actor import ParallelConfig
from megatron_rl.runtime import device, distributed, nvml
class Finder:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "transformer_engine":
            print("asked for", os.environ.get(nvml.FP32_SCALES), flush=True)
            os._exit(0)
device.is_hopper = lambda: True
sys.meta_path.insert(0, Finder())
assert not {"megatron.core", "transformer_engine"} & sys.modules.keys()
for given, wanted, port in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update({"MASTER_PORT": port} | ({} if given is None else {nvml.FP32_SCALES: given}))
        distributed.initialize(ParallelConfig(), timeout_minutes=1, fp32_scales=wanted)
        os._exit(1)
    os.wait()
"""


def test_transformer_engine_finds_fp32_scales_when_it_is_imported() -> None:
    """Its recipe reads the variable as a class attribute: set later it would have no effect."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **rank_environment(gpus=0), **world, "CUDA_VISIBLE_DEVICES": ""}
    cases = [(given, wanted, str(free_port())) for given, wanted in ((None, True), ("0", True), (None, False))]
    command = [sys.executable, "-c", INITIALIZE, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["asked for 1", "asked for 0", "asked for None"], done.stderr


def test_the_environments_cudnn_comes_before_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a card with another cuDNN in the system's folders Transformer Engine took that one, and unfused attention."""
    own = tmp_path / "nvidia" / "cudnn"
    (own / "lib").mkdir(parents=True)
    monkeypatch.setattr(cudnn.sysconfig, "get_path", lambda name: str(tmp_path))
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/mine:")
    found = rank_environment(gpus=1)
    assert (found["CUDNN_HOME"], found["LD_LIBRARY_PATH"]) == (str(own), f"{own}/lib:/opt/mine")
    assert "CUDNN_HOME" not in rank_environment(gpus=0)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{own}/lib:/opt/mine")  # a rank's own ranks
    assert rank_environment(gpus=1)["LD_LIBRARY_PATH"] == f"{own}/lib:/opt/mine"
    monkeypatch.setenv("CUDNN_PATH", "/opt/cudnn")
    assert not {"CUDNN_HOME", "LD_LIBRARY_PATH"} & rank_environment(gpus=1).keys()
