"""What one node finds out about itself: its files, limits and endpoints."""

from __future__ import annotations

import contextlib
import json
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
from megatron_rl.preflight import across_ranks, local, storage
from megatron_rl.preflight.across_ranks import _differences
from megatron_rl.preflight.verdict import FAILED, WARNING, Measured, NodeFinding, Report, merged
from megatron_rl.runtime.attempts import free_port

T = TypeVar("T")


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
    (tmp_path / "rows.parquet").write_bytes(b"")
    assert "not a whole Parquet file" in next(local.check_data(config))[1]


def test_a_datasets_folder_has_other_files_beside_its_rows(config: Config, tmp_path: Path) -> None:
    """As `hf download --local-dir` and `save_to_disk` leave them: locks, which are empty, and JSON over several lines."""
    folder = tmp_path / "dataset"
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "rows.lock").touch()
    (folder / "_SUCCESS").touch()
    (folder / "state.json").write_text(json.dumps({"_data_files": []}, indent=2))
    (folder / "data.arrow").write_bytes(b"rows")
    config.tasks.train["sums"] = TaskConfig(source="huggingface", path=str(folder))
    assert list(local.check_data(config)) == []
    assert str(folder / "data.arrow") in local.data_facts(config)
    assert not any(".cache" in name for name in local.data_facts(config)), "which says when a node has fetched it"
    (folder / "train.parquet").write_bytes(b"PAR1 cut short")
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


def test_a_check_that_cannot_be_made_is_a_finding(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Config) -> local.Problems:
        raise OSError(5, "Input/output error", "/scratch")
        yield

    monkeypatch.setitem(local.PER_NODE, "disks", broken)
    problems, _ = local.survey(config, first_of_node=True)
    assert ("disks", FAILED, "[Errno 5] Input/output error: '/scratch'") in problems


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
