"""A dataset that a recipe names on the Hugging Face hub, with a stand-in for the hub: commands download it themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hub import Hub

from .job import Job

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
OVERRIDES = (
    *("tasks.train.sums=null", "tasks.eval.held_out=null", "rewards.judge=null", "rewards.format=null"),
    *("tasks.train.hub.source=huggingface", "tasks.train.hub.path=someone/sums"),
    *("tasks.eval.asked.source=huggingface", "tasks.eval.asked.path=someone/others", "tasks.eval.asked.size=4"),
    *("rewards.correct.reward=math", "trainer.steps=1", "sft.steps=0", "checkpoint.every=0"),
    *("rollout.tensor_parallel=1", "actor.parallel.tensor=1"),
)


@pytest.mark.ranks
@pytest.mark.engine
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_dataset_of_the_hub_is_downloaded(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes are new: `huggingface_hub` reads its settings when it is imported."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with Hub({"someone/sums": SUMS, "someone/others": SUMS[::5]}) as hub:
        where = hub.environment(tmp_path / "home")
        processes = (
            f"launch.processes={2 if command == 'train' else 1}"  # two are forks of a third, which imports first
        )
        job = Job(tmp_path, *OVERRIDES, processes, command=command, environment=where, is_new=True)
        assert job.finish() == 0, job.stderr
        read = {name for name in hub.files if f"GET {hub.place(name)}" in hub.asked}
    assert read == ({"someone/sums", "someone/others"} if command == "train" else {"someone/others"})
    assert "eval/asked/avg@1" in json.loads((job.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
