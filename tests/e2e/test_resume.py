"""Promise 3: steps, SIGKILL, resume, steps are the same as steps without interruption, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.runtime.heartbeat import heartbeats
from megatron_rl.runtime.postmortem import heartbeat_folder

from .conftest import STATEFUL, Finished
from .job import RECIPE, Job, processes_of, rows, samples, segments, untimed, variable

pytestmark = pytest.mark.engine
STEPS = RECIPE["trainer"]["steps"]
# Drafts change nothing that is drawn, and what they are made from is not in a checkpoint: so the run that is stopped has
# them, and the one that it is compared with has none.
SPECULATING = (*STATEFUL, "rollout.speculation.tokens=3")


def damage(checkpoints: Path) -> int:
    """Cuts a file of the newest checkpoint short and adds what interrupted saves leave. The step cut short."""
    newest = max(checkpoints.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size - 1)
    half = checkpoints / ".step_9.writing"
    shutil.copytree(newest, half)
    unlisted = checkpoints / "step_8"
    shutil.copytree(newest, unlisted)
    (unlisted / "manifest.json").unlink()
    return int(newest.name.removeprefix("step_"))


def generates(beat: Mapping[str, Any], step: int) -> bool:
    """Whether a rank's heartbeat says that it draws the rollouts of this step."""
    return (beat.get("stage"), beat.get("step"), beat.get("phase")) == ("RL", step, "generate")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, int]:
    """Told to stop in the generation of step 2, resumed; killed after a checkpoint, damaged, resumed to the end; and the step
    of the damaged checkpoint."""
    folder = tmp_path_factory.mktemp("resumed")
    stopped = Job(folder, *SPECULATING)
    heartbeat = heartbeat_folder(stopped.run_dir / "logs" / "attempt_1")
    stopped.wait_for(lambda: generates(heartbeats(heartbeat).get(0, {}), step=2))
    os.kill(stopped.process.pid, signal.SIGTERM)
    assert stopped.finish() == 143
    assert rows(stopped.run_dir)[-1]["step"] in (1, 2)  # step 2 is given up, unless its update began just then
    first = Job(folder, *SPECULATING)
    first.wait_for_checkpoint(2)
    port = variable(first.ranks()[0], "MASTER_PORT")
    first.kill()
    assert processes_of(first.run_dir) == []
    assert segments(port) == []
    assert 2 <= rows(first.run_dir)[-1]["step"] <= STEPS
    cut = damage(first.run_dir / "checkpoints")
    second = Job(folder, *SPECULATING, "--resume", "auto")
    second.succeed()
    return second, cut


def test_checkpoints_that_are_not_whole_are_named_and_passed_over(resumed: tuple[Job, int]) -> None:
    job, cut = resumed
    assert "skipping step_8: its manifest.json cannot be read" in job.stdout
    assert f"skipping step_{cut}: " in job.stdout
    assert "it held tensor " in job.stdout
    assert f"continuing after step {cut - 1}" in job.stdout
    assert "moved an earlier run's" not in job.stdout
    assert f"moved step_8, step_{cut} to" in job.stdout
    aside = job.run_dir / "checkpoints" / "previous_1"
    assert sorted(path.name for path in aside.iterdir()) == [f"step_{cut}", "step_8"]
    assert not (job.run_dir / "checkpoints" / ".step_9.writing").exists()


def test_every_step_is_the_same_bit_for_bit(resumed: tuple[Job, int], straight: Finished) -> None:
    own, want = rows(resumed[0].run_dir), rows(straight.run_dir)
    assert [row["step"] for row in own] == list(range(STEPS + 1))
    for mine, theirs in zip(own, want, strict=True):
        drafts = {name: value for name, value in mine.items() if name.startswith("rollouts/draft")}
        assert untimed(mine) == untimed(theirs) | drafts
    assert any(row.get("rollouts/drafted_share", 0) > 0 for row in own), "the drafts were never right"
    for name in [*(f"step_{n}.jsonl" for n in range(1, STEPS + 1)), f"eval_held_out_step_{STEPS}.jsonl"]:
        assert samples(resumed[0].run_dir, name) == samples(straight.run_dir, name)


def test_the_weights_are_the_same_bit_for_bit(resumed: tuple[Job, int], straight: Finished) -> None:
    for folder in ("export", "reference"):
        own, want = (
            (run / folder / "model.safetensors").read_bytes() for run in (resumed[0].run_dir, straight.run_dir)
        )
        assert own == want


def test_the_estimators_state_was_part_of_it(straight: Finished) -> None:
    for step in range(1, STEPS + 1):
        state = json.loads((straight.run_dir / "checkpoints" / f"step_{step}" / "state.json").read_text())
        assert state["algorithm"]["estimator"] == "awpo"
        assert state["algorithm"]["state"], "AWPO keeps a running peak"
        position = step * RECIPE["trainer"]["prompts_per_step"]
        assert state["progress"] == {"step": step, "position": position, "warm_up": RECIPE["sft"]["steps"]}
        assert state["optimizer_steps"] == step * RECIPE["trainer"]["minibatches"]
