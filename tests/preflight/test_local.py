"""What one node finds out about itself."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import TypeVar

import pytest

from megatron_rl.config.schema import Config, RewardConfig, TaskConfig
from megatron_rl.preflight import across_ranks, gpus, local, storage
from megatron_rl.preflight.across_ranks import _differences
from megatron_rl.preflight.verdict import FAILED, WARNING, Measured, NodeFinding, Report, merged
from megatron_rl.runtime import compilers
from megatron_rl.runtime.attempts import free_port

T = TypeVar("T")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=str(tmp_path / "run"))


def model_folder(folder: Path, weights: int = 1000) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(weights))
    return folder


def test_a_model_folder_must_be_there_and_whole(config: Config, tmp_path: Path) -> None:
    config.model.path = str(tmp_path / "model")
    [(level, text)] = local.check_model(config)
    assert level == FAILED
    assert f"model.path {tmp_path / 'model'} is not there" in text
    folder = model_folder(tmp_path / "model")
    assert list(local.check_model(config)) == []
    (folder / "model.safetensors").rename(folder / "model.bin")
    assert "neither .safetensors files" in next(local.check_model(config))[1]
    (folder / "config.json").unlink()
    assert "config.json cannot be read" in next(local.check_model(config))[1]


def test_another_tokenizer_on_one_node_is_named(config: Config, tmp_path: Path) -> None:
    config.model.path = str(model_folder(tmp_path / "model"))
    good = local.model_facts(config)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"a": 1}')
    bad = local.model_facts(config)
    everywhere = [(node, {"model": bad if node == "n2" else good}) for node in ("n1", "n2", "n3")]
    [finding] = _differences(everywhere)
    assert (finding.check, finding.level, finding.node) == ("model", FAILED, "n2")
    assert "tokenizer_config.json is " in finding.text


def test_files_of_prompts_are_read_a_little(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    config.tasks.train["sums"] = TaskConfig(source="jsonl", path=str(path))
    path.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    assert list(local.check_data(config)) == []
    assert list(local.data_facts(config)) == [str(path)]
    path.write_text("no json\n")
    assert "line 1" in next(local.check_data(config))[1] or "rows.jsonl:1" in next(local.check_data(config))[1]
    path.write_text("")
    assert "it is empty" in next(local.check_data(config))[1]
    config.tasks.train["sums"] = TaskConfig(source="parquet", path=str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 cut short")
    assert "not a whole Parquet file" in next(local.check_data(config))[1]


def test_room_for_checkpoints_is_counted_from_the_weights(config: Config, tmp_path: Path) -> None:
    config.model.path = str(model_folder(tmp_path / "model", 2000))
    config.model.dtype = "bfloat16"
    assert local.checkpoint_bytes(config) == 1000 * (2 + 4 + 8)
    config.model.dtype = "float32"
    assert local.checkpoint_bytes(config) == 500 * (4 + 8)
    config.checkpoint.every = 1
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(2**43)  # takes no room
    [(level, text)] = local.check_run_dir(config)
    assert level == FAILED
    assert "one checkpoint needs about" in text


@contextlib.contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_few_open_files_are_named(config: Config) -> None:
    with limited(resource.RLIMIT_NOFILE, 1000):
        [(level, text)] = [problem for problem in local.check_limits(config) if "ulimit -n" in problem[1]]
    assert level == WARNING
    assert "at most 1000 open files" in text


def test_a_limited_address_space_is_named(config: Config) -> None:
    with limited(resource.RLIMIT_AS, 2**45):
        [(level, text)] = [problem for problem in local.check_limits(config) if "ulimit -v" in problem[1]]
    assert level == WARNING
    assert "32768.0 GiB" in text


def test_limits_that_keep_ranks_from_meeting_are_told_before_they_try(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_rl.trainer.rank import program

    assert program.within_limits(config)
    with limited(resource.RLIMIT_NOFILE, 400):
        assert not program.within_limits(config)
        said = capsys.readouterr().err
        config.launch.preflight = "off"
        assert program.within_limits(config)
    assert said.startswith("megatron-rl: node ")
    assert "is not fit: at most 400 open files per process (ulimit -n)" in said


def test_the_command_says_why_its_ranks_did_not_meet(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        f"base: {Path('recipes/cpu/quickstart.yaml').resolve()}\nrun_dir: {tmp_path / 'run'}\n"
    )
    command = [sys.executable, "-m", "megatron_rl", "preflight", str(tmp_path / "recipe.yaml"), "--quick"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 100; "$@"', "bash", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert done.stderr.startswith("megatron-rl: node ")
    assert "is not fit: at most 100 open files per process (ulimit -n)" in done.stderr


class Judge(BaseHTTPRequestHandler):
    """Answers 401 without the key."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers.get("Authorization") == "Bearer right" else 401)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def test_a_judge_must_answer_and_take_the_key(config: Config, judge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = f"http://127.0.0.1:{free_port()}/v1"
    config.rewards["quality"] = RewardConfig(
        reward="judge", params={"urls": [judge, silent], "api_key_env": "JUDGE_KEY"}
    )
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    [(_, text)] = local.check_endpoints(config)
    assert "the environment variable JUDGE_KEY (api_key_env) is not set" in text
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    texts = [text for _, text in local.check_endpoints(config)]
    assert texts[0] == f"rewards.quality: {judge}: HTTP 401: the key is refused"
    assert texts[1].startswith(f"rewards.quality: {silent}: not reachable (")
    monkeypatch.setenv("JUDGE_KEY", "right")
    [(level, text)] = local.check_endpoints(config)
    assert (level, silent in text) == (WARNING, True), "requests go to the other one"


def test_a_silent_judge_keeps_a_run_from_starting_but_not_from_going_on(config: Config) -> None:
    silent = [f"http://127.0.0.1:{free_port()}/v1" for _ in range(2)]
    config.rewards["quality"] = RewardConfig(reward="judge", params={"urls": silent})
    assert [level for level, _ in local.check_endpoints(config)] == [FAILED, FAILED]
    kept = Path(config.run_dir) / "answers" / "quality"
    kept.mkdir(parents=True)
    assert [level for level, _ in local.check_endpoints(config)] == [FAILED, FAILED], "nothing is kept there yet"
    (kept / "rank0.jsonl").write_text('{"key": "a", "score": 1.0, "reply": ""}\n')
    assert [level for level, _ in local.check_endpoints(config)] == [WARNING, WARNING]


class Alone:
    """A world of one rank."""

    rank, world = 0, 1

    def all_gather(self, item: T) -> list[T]:
        return [item]

    def barrier(self) -> None:
        pass


def test_a_judge_that_starts_later_is_waited_for(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    params = {"urls": f"http://127.0.0.1:{port}/v1", "api_key_env": "JUDGE_KEY"}
    config.rewards["quality"] = RewardConfig(reward="judge", params=params)
    monkeypatch.setenv("JUDGE_KEY", "right")
    monkeypatch.setattr(across_ranks, "_ASK_AGAIN", 0.05)
    config.launch.endpoint_minutes = 0.001
    across_ranks._await_endpoints(config, Alone(), True)
    assert [level for level, _ in local.check_endpoints(config)] == [FAILED], "it has not come in that time"

    servers: list[HTTPServer] = []

    def start(seconds: float) -> None:  # in place of the first sleep
        if not servers:
            servers.append(HTTPServer(("127.0.0.1", port), Judge))
            Thread(target=servers[0].serve_forever, daemon=True).start()

    config.launch.endpoint_minutes = None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(across_ranks.time, "sleep", start)
    across_ranks._await_endpoints(config, Alone(), True)
    assert not list(local.check_endpoints(config))
    assert f"no answer yet from rewards.quality (http://127.0.0.1:{port}/v1); waiting, at most 10 min" in (
        capsys.readouterr().err
    )
    servers[0].shutdown()


def test_a_judge_that_no_estimator_asks_may_be_silent(config: Config) -> None:
    params = {"urls": f"http://127.0.0.1:{free_port()}/v1"}
    config.rewards["judge"] = RewardConfig(reward="judge", when_needed=True, params=params)
    assert not list(local.check_endpoints(config))
    config.algorithm.estimator.name = "awpo"
    assert [level for level, _ in local.check_endpoints(config)] == [FAILED]


NVIDIA_SMI = """\
0, GPU-aa01, 0, No, No, 120, 81559
1, GPU-bb02, 3, No, No, 0, 81559
2, GPU-cc03, [N/A], Yes, No, 0, 81559
3, GPU-dd04, 0, No, No, 60000, 81559
"""


def test_what_nvidia_smi_says_is_understood() -> None:
    found = list(gpus.gpu_problems(NVIDIA_SMI, memory_fraction=0.6))
    assert [text.split(":")[0].split(" has")[0].split(" could")[0] for _, text in found] == ["GPU 1", "GPU 2", "GPU 3"]
    assert "3 uncorrected memory errors" in found[0][1]
    assert "58.6 GiB of 79.6 GiB are in use by other processes" in found[2][1]
    ((level, text),) = gpus.gpu_problems("5, GPU-ee, 0, No, Yes, 0, 81559\n", memory_fraction=0.6)
    assert (level, "GPU 5" in text, "reset" in text) == (WARNING, True, True)


@pytest.mark.parametrize(("visible", "seen"), [("0, 3", "3"), ("GPU-cc,0", "2"), ("0", ""), ("", ""), ("MIG-bb02", "")])
def test_only_the_jobs_own_gpus_count(visible: str, seen: str) -> None:
    found = gpus.gpu_problems(NVIDIA_SMI, 0.6, visible)
    assert "".join(text.removeprefix("GPU ")[0] for _, text in found) == seen


def test_a_driver_that_hangs_does_not_hang_the_check(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in {"nvidia-smi": "exec sleep 60", "dmesg": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "_ANSWER", 0.5)
    [(level, text)] = gpus.check_gpus(config)
    assert (level, "nvidia-smi has not answered" in text) == (FAILED, True)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho Unable to determine the device handle\nexit 255\n")
    monkeypatch.setattr(gpus, "_ANSWER", 10.0)
    assert list(gpus.check_gpus(config)) == [(FAILED, "nvidia-smi fails: Unable to determine the device handle")]
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\ncase "$*" in *driver_version*) echo 535.183.01 ;; esac\n')
    assert [text[:35] for _, text in gpus.check_gpus(config)] == ["the NVIDIA driver is 535.183.01, an"]


def test_a_process_must_see_all_gpus_of_its_node(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert list(gpus.check_devices(config)) == []
    monkeypatch.setattr(gpus, "count_gpus", lambda: 8)
    [(level, text)] = gpus.check_devices(config)
    assert (level, "can use none of the 8 GPUs here: it is a build for CPUs" in text) == (FAILED, True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    [(level, text)] = gpus.check_devices(config)
    assert (level, "sees 1 of the GPUs of its node, on which 8 processes run" in text) == (FAILED, True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert list(gpus.check_devices(config)) == []
    assert local.PER_RANK["devices"] is gpus.check_devices


def test_a_cache_that_cannot_be_written_is_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without its user's home."""
    assert list(gpus.check_caches(config)) == [], "without GPUs nothing is compiled"
    monkeypatch.setattr(gpus, "count_gpus", lambda: 8)
    for name in compilers.CACHES:
        monkeypatch.setenv(name, str(tmp_path / name))
    assert list(gpus.check_caches(config)) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "file" / "below"))
    [(level, text)] = gpus.check_caches(config)
    assert (level, "FLASHINFER_WORKSPACE_BASE" in text, "MEGATRON_RL_CACHE" in text) == (FAILED, True, True)
    assert local.PER_NODE["caches"] is gpus.check_caches


def test_fp8_rollouts_need_a_compiler_on_every_node(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert list(gpus.check_compilers(config)) == []
    assert gpus.compiler_facts(config) == {}
    monkeypatch.setattr(gpus, "count_gpus", lambda: 8)
    assert gpus.compiler_facts(config) == {"nvcc": "missing", "ninja": "missing"}
    assert list(gpus.check_compilers(config)) == [], "without FlashInfer nothing is lost"
    config.rollout.fp8 = "blockwise"
    [(level, text)] = gpus.check_compilers(config)
    assert (level, "no nvcc and no ninja here" in text, "site_setup" in text) == (FAILED, True, True)
    (tmp_path / "bin").mkdir()
    for name in ("nvcc", "ninja"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n")
        (tmp_path / "bin" / name).chmod(0o755)
    [(level, text)] = gpus.check_compilers(config)
    assert (level, "nvcc is of CUDA 12.8" in text, "12.9 or newer" in text) == (FAILED, True, True)
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    assert list(gpus.check_compilers(config)) == []
    good, bad = gpus.compiler_facts(config), {"nvcc": "there", "ninja": "missing"}
    [finding] = _differences([(node, {"compilers": bad if node == "n2" else good}) for node in ("n1", "n2", "n3")])
    assert (finding.check, finding.level, finding.node) == ("compilers", FAILED, "n2")
    assert local.PER_NODE["compilers"] is gpus.check_compilers


def test_a_resume_that_would_pass_its_deadline_is_foretold(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From how fast the file system reads, the newest checkpoint or else the model."""
    config.model.path, config.model.dtype = str(model_folder(tmp_path / "model", 2**20)), "bfloat16"
    config.checkpoint.every = 1
    measured: Measured = {}
    assert storage.reading(config, Alone(), measured) == []
    assert measured == {}, "a MiB says nothing"
    monkeypatch.setattr(storage, "_LEAST", 2**18)
    assert storage.reading(config, Alone(), measured) == []
    assert measured["read_gb_per_s"] > 0
    monkeypatch.setattr(storage, "_read", lambda files, rank: (2**20, 2.0))
    monkeypatch.setattr(storage, "checkpoint_bytes", lambda config: 2**20 * 60 * 30)  # 60 min at that speed
    [finding] = storage.reading(config, Alone(), measured)
    assert (finding.level, measured["resume_minutes"]) == (WARNING, 60.0)
    assert "takes 60 min to check" in finding.text
    assert "has 20 min for each; watchdog.phases.load=120" in finding.text
    config.watchdog.phases["load"] = 120
    assert storage.reading(config, Alone(), measured) == []
    line = Report(["n1"], 1, ["storage"], [], measured).text()
    assert line.endswith("fit; files are read at 0.00 GB/s, a checkpoint in about 60.0 min")
    saved = tmp_path / "run" / "checkpoints" / "step_4"
    saved.mkdir(parents=True)
    (saved / "__0_0.distcp").write_bytes(b"x")
    assert storage._files(config) == [saved / "__0_0.distcp"]


def test_an_old_driver_is_named_with_the_minimum() -> None:
    assert list(gpus.driver_problems("580.65.06\n580.65.06\n")) == []
    [(level, text)] = gpus.driver_problems("535.183.01\n535.183.01\n")
    assert (level, "is 535.183.01, and CUDA 13 needs 580 or newer" in text) == (FAILED, True)


def test_a_check_that_cannot_be_made_is_a_finding(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Config) -> local.Problems:
        raise OSError(5, "Input/output error", "/scratch")
        yield

    monkeypatch.setitem(local.PER_NODE, "disks", broken)
    problems, _ = local.survey(config, first_of_node=True)
    assert ("disks", FAILED, "[Errno 5] Input/output error: '/scratch'") in problems


def test_xid_errors_are_read_from_the_kernel_log() -> None:
    log = """\
[    0.000000] Linux version 6.1.0
[ 3600.100000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 7200.250000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 7300.000001] NVRM: Xid (PCI:0000:86:00): 31, pid=4242, name=python, Ch 00000008, intr 00000000. MMU Fault
[10000.500000] audit: NVRM: Xid (PCI:0000:00:00): 48, quoted by another line
NVRM: Xid (0000:af:00): 95, pid=77, Uncontained ECC error
"""
    found = list(gpus.xid_problems(log, uptime=10800.0))
    assert [level for level, _ in found] == [WARNING, WARNING]
    assert "0000:3b:00 had Xid 79 1.0 h ago: the GPU fell off the bus" in found[0][1]
    assert "0000:af:00 had Xid 95: an uncontained memory error" in found[1][1]
    assert not list(gpus.xid_problems("", uptime=1.0))


def test_the_report_is_short_worst_first_and_names_nodes_once() -> None:
    found = [
        NodeFinding("disks", WARNING, "n1", "TMPDIR is small"),
        NodeFinding("disks", WARNING, "n2", "TMPDIR is small"),
        NodeFinding("disks", WARNING, "n1", "TMPDIR is small"),
        NodeFinding("data", FAILED, "n2", "no file"),
    ]
    report = Report(["n1", "n2"], 16, ["data", "disks"], merged(found), {"allreduce_gb_per_s": 41.2}, 3.21)
    first, second, last = report.text().splitlines()
    assert first.split() == ["failed", "n2", "data", "no", "file"]
    assert second.split()[:3] == ["warning", "n1,", "n2"]
    assert last == "pre-flight: 2 nodes, 16 ranks, 2 checks in 3.2 s: NOT FIT; all-reduce 41.20 GB/s"
    assert report.failed
    assert not Report(["n1"], 1, []).failed
