"""Pre-flight on two nodes: two hosts by name and by what they have mounted (Linux namespaces), one rank on each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.runtime import exit_codes
from megatron_rl.runtime.attempts import free_port

CAN_ISOLATE = (
    shutil.which("unshare") is not None
    and subprocess.run(
        ["unshare", "--mount", "--uts", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
    ).returncode
    == 0
)
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not CAN_ISOLATE, reason="mount namespaces need root here"),
]


@dataclass
class Cluster:
    """A recipe whose data lies in a folder of its own, and two nodes `n1`, `n2` to check it on."""

    folder: Path

    def write_recipe(self, **changes: Any) -> None:
        data = self.folder / "data"
        data.mkdir()
        rows = "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(20))
        (data / "train.jsonl").write_text(rows)
        recipe = {
            "run_dir": str(self.folder / "run"),
            "model": {"create": {}, "dtype": "float32"},
            "tasks": {"train": {"sums": {"source": "jsonl", "path": str(data / "train.jsonl")}}},
            "rewards": {"correct": {"reward": "math"}},
            "rollout": {"max_prompt_tokens": 64, "max_tokens": 64},
            "trainer": {"eval_every": 0},
            "checkpoint": {"every": 1},
            **changes,
        }
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def check(self, before: dict[str, str] | None = None, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, report and what was printed.

        Args:
            before: what a shell does on a node before the command (`all`: once, before both nodes are made).
        """
        before = before or {}
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        command = f"{sys.executable} -m megatron_rl preflight {self.folder / 'recipe.yaml'} {' '.join(arguments)}"
        nodes = [
            f"unshare --mount --uts bash -ec 'hostname n{n + 1}; {before.get(f'n{n + 1}', '')}\n"
            f"RANK={n} LOCAL_RANK=0 exec {command}' > {self.folder}/n{n + 1}.log 2>&1 & pid{n}=$!"
            for n in range(2)
        ]
        ends = "wait $pid0; first=$?; wait $pid1; second=$?; exit $((first > second ? first : second))"
        script = "\n".join([before.get("all", ""), *nodes, ends])
        done = subprocess.run(["unshare", "--mount", "bash", "-c", script], env=variables, timeout=120)
        logs = [(self.folder / f"n{n}.log").read_text() for n in (1, 2)]
        printed = logs[0].splitlines()
        report = "\n".join(printed[next((i for i, line in enumerate(printed) if line == "{"), len(printed)) :])
        return done.returncode, json.loads(report) if report else {}, "".join(logs)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def found(report: dict[str, Any], level: str = "failed") -> dict[str, tuple[str, str]]:
    """check -> (node, text)"""
    return {f["check"]: (f["node"], f["text"]) for f in report["findings"] if f["level"] == level}


def test_two_good_nodes_are_fit_and_measured(cluster: Cluster) -> None:
    cluster.write_recipe()
    code, report, printed = cluster.check({}, "--json")
    assert code == exit_codes.OK, printed
    assert report["fit"]
    assert found(report) == {}
    assert report["nodes"] == ["n1", "n2"]
    assert report["measured"]["allreduce_gb_per_s"] > 0
    assert set(report["measured"]["links_gb_per_s"]) == {"n1 -> n2", "n2 -> n1"}
    assert report["measured"]["clock_skew_s"] < 5
    assert json.loads((cluster.folder / "run" / "preflight.json").read_text())["fit"]
    assert not list((cluster.folder / "run").glob(".preflight*"))


def test_a_missing_dataset_another_version_and_a_silent_judge_are_named_with_their_node(cluster: Cluster) -> None:
    judge = {"reward": "judge", "params": {"urls": f"http://127.0.0.1:{free_port()}/v1", "model": "judge"}}
    cluster.write_recipe(rewards={"correct": {"reward": "math"}, "quality": judge})
    other = cluster.folder / "other" / "transformers-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
    hide = f"mount -t tmpfs none {cluster.folder / 'data'}; export PYTHONPATH={other.parent}"
    code, report, printed = cluster.check({"n2": hide}, "--json", "--quick")
    assert code == exit_codes.PREFLIGHT, printed
    problems = found(report)
    assert set(problems) == {"data", "versions", "endpoints"}
    assert problems["data"][0] == "n2"
    assert "tasks.train.sums.path" in problems["data"][1]
    assert str(cluster.folder / "data" / "train.jsonl") in problems["data"][1]
    assert problems["versions"][0] in ("n1", "n2")  # two nodes: no majority
    assert "transformers is " in problems["versions"][1]
    assert "0.0.1" in problems["versions"][1]
    assert problems["endpoints"][0] == "n1, n2"
    assert "rewards.quality: http://127.0.0.1:" in problems["endpoints"][1]
    assert "not reachable (" in problems["endpoints"][1]


def test_a_full_disk_is_named(cluster: Cluster) -> None:
    cluster.write_recipe()
    run_dir = cluster.folder / "run"
    code, _, printed = cluster.check({"all": f"mkdir {run_dir}; mount -t tmpfs -o size=512k none {run_dir}"}, "--quick")
    assert code == exit_codes.PREFLIGHT, printed
    assert f"run_dir {run_dir}: writing 1 MiB fails: No space left on device" in printed
    assert "NOT FIT" in printed


def test_a_run_folder_that_is_not_shared_is_named(cluster: Cluster) -> None:
    cluster.write_recipe()
    run_dir = cluster.folder / "run"
    run_dir.mkdir()
    code, report, printed = cluster.check({"n2": f"mount -t tmpfs none {run_dir}"}, "--json", "--quick")
    assert code == exit_codes.PREFLIGHT, printed
    assert found(report).keys() == {"shared"}
    assert {(f["node"], f["text"].split("not seen on ")[1].split(":")[0]) for f in report["findings"]} == {
        ("n1", "n2"),
        ("n2", "n1"),
    }


def test_a_node_that_does_not_come_is_told_by_its_ranks(cluster: Cluster) -> None:
    cluster.write_recipe()
    code, _, printed = cluster.check({"n2": "exit 3"}, "--quick", "--minutes", "0.1")
    assert code == exit_codes.PREFLIGHT
    assert "node n1: 1 of 2 ranks have not come within 0.1 min: 1; ranks came from: n1" in printed
