"""Split placement on the real stack: one role generates a step ahead of the other. Exact, killed or not; faults by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from rewards import chat_server

from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config import Config
from megatron_rl.resume_proof.proof import differences
from megatron_rl.rollout.ahead import Batch, unpack
from megatron_rl.runtime import exit_codes
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.trainer.compatibility import check_drawn

from .job import RECIPE, STOPPING, Job, processes_of, rows, samples, segments, untimed, variable
from .test_partial import TOLERANCE, policy_of, score, training_prompts

pytestmark = pytest.mark.engine
STEPS, UPDATES = RECIPE["trainer"]["steps"], RECIPE["trainer"]["minibatches"]
# Two ranks learn, and the last one generates.
SPLIT = ("launch.processes=3", "launch.generators=1", "rollout.tensor_parallel=1", "sft.steps=15")
PARTIAL = "rollout.partial={chunk_tokens: 3, open_prompts: 16}"
EVERY_SAMPLE = "logging.samples_per_step=32"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never interrupted. A judge is asked, whose scores weigh nothing."""
    with chat_server.serving(lambda number, body: "score: 0.5") as judge:
        asks = ("rewards.judge.reward=judge", "rewards.judge.weight=0", "rewards.judge.when_needed=false")
        asks += ("rewards.judge.params.model=m",)
        job = Job(
            tmp_path_factory.mktemp("split"), *SPLIT, EVERY_SAMPLE, *asks, f"rewards.judge.params.urls={judge.url}"
        )
        job.succeed()
    return job.run_dir


def ahead_of(run_dir: Path, step: int) -> Batch:
    content = (run_dir / "checkpoints" / f"step_{step}" / "ahead.npz").read_bytes()
    return unpack(content, ALONE, {sample.id: sample for sample in training_prompts(run_dir)})


def test_a_step_is_drawn_by_the_weights_before_the_last_step(run: Path) -> None:
    """By transformers, with each checkpoint's weights: those of a step later give other numbers."""
    later = []
    for step in range(1, STEPS):  # the checkpoint has what step + 1 learns from
        rollouts = ahead_of(run, step).rollouts
        before, after = policy_of(run, step - 1), policy_of(run, step)
        assert len(rollouts.held) == len(rollouts) == 32
        for rollout in rollouts.held.values():
            prompt, drawn = rollout.segments
            assert drawn.logprobs is not None
            assert drawn.version == (step - 1) * UPDATES
            assert np.abs(score(before, prompt.ids, drawn) - drawn.logprobs).max() < TOLERANCE
            later.append(float(np.abs(score(after, prompt.ids, drawn) - drawn.logprobs).max()))
        of_step = samples(run, f"step_{step + 1}.jsonl")
        assert [one["rewards"]["correct"] for one in of_step] == rollouts.rewards[:, 0].tolist()
    assert np.median(later) > 10 * TOLERANCE
    last = run / "checkpoints" / f"step_{STEPS}"
    assert not (last / "ahead.npz").exists()
    check_drawn(Config(run_dir=""), last)
    with pytest.raises(CheckpointError, match="the next step's responses are in it, drawn by earlier weights"):
        check_drawn(Config(run_dir=""), last.with_name("step_1"))


def test_the_metrics_say_how_old_the_batch_is(run: Path) -> None:
    first, second = rows(run)[1], rows(run)[2]
    assert first["mismatch/abs_log_ratio_max"] < TOLERANCE < second["mismatch/abs_log_ratio_max"]
    for row in rows(run)[1:STEPS]:
        parts = sum(row[f"timing_s/{name}"] for name in ("wait", "estimate", "old_log_prob", "update", "sync"))
        assert 0.5 * row["timing_s/step"] - 1 < parts < row["timing_s/step"], "generation is beside it"
        assert row["timing_s/generate"] > 0
        assert "timing_s/reward" in row
    evaluated = [row["step"] for row in rows(run) if "eval/held_out/avg@1" in row]
    assert evaluated == [0, 2, STEPS]
    questions = len((run / "samples" / f"eval_held_out_step_{STEPS}.jsonl").read_text().splitlines())
    for row in rows(run):
        asked = 32 * (row["step"] > 0) + questions * (row["step"] in evaluated)
        assert (row["judge/scored"], row["judge/no_score"]) == (asked, 0), "of the step and of the evaluation after it"


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside the split, responses that go on in later steps."""
    job = Job(tmp_path_factory.mktemp("partial"), *SPLIT, PARTIAL, EVERY_SAMPLE)
    job.succeed()
    return job.run_dir


def test_when_a_generator_dies_the_run_ends_by_name_and_goes_on_to_the_same_bits(partial: Path, tmp_path: Path) -> None:
    killed = Job(tmp_path, *SPLIT, PARTIAL, EVERY_SAMPLE)
    killed.wait_for_checkpoint(2)
    port = variable(killed.ranks()[0], "MASTER_PORT")
    os.kill(killed.ranks()[2], signal.SIGKILL)
    assert killed.finish() != 0
    assert "rank 2" in killed.stderr
    assert processes_of(killed.run_dir) == []
    assert segments(port) == []
    again = Job(tmp_path, *SPLIT, PARTIAL, EVERY_SAMPLE)
    again.succeed()
    assert "continuing after step " in again.stdout
    assert differences(partial, again.run_dir) == []
    waits = rows(partial)[STEPS]["rollouts/waiting_groups"]
    assert waits == 8
    assert (partial / "checkpoints" / f"step_{STEPS}" / "waiting.npz").is_file(), "for a run that goes on further"
    ages = [row["rollouts/staleness_max"] for row in rows(partial)[1:]]
    assert ages[:2] == [0, 1]
    assert max(ages) > 1


def test_neither_the_number_of_engines_nor_the_way_of_the_weights_changes_a_bit(run: Path, tmp_path: Path) -> None:
    """Two engines; whole tensors; no judge; a signal, after which the run goes on."""
    two = (*SPLIT[2:], "launch.processes=4", "launch.generators=2", "rollout.sync=whole", EVERY_SAMPLE)
    stopped = Job(tmp_path, *two)
    stopped.wait_for_step(1)
    os.kill(stopped.process.pid, signal.SIGTERM)
    assert stopped.finish() == 143
    job = Job(tmp_path, *two)
    job.succeed()
    assert "continuing after step " in job.stdout
    for mine, theirs in zip(rows(job.run_dir), rows(run), strict=True):
        assert untimed(mine) == {name: value for name, value in untimed(theirs).items() if "judge" not in name}
    exports = [(folder / "export" / "model.safetensors").read_bytes() for folder in (run, job.run_dir)]
    assert exports[0] == exports[1]


def test_a_generator_that_stops_is_named_by_the_ranks_that_wait(tmp_path: Path) -> None:
    """After a step whose adapters alone went to the engine."""
    lora = "actor.lora={rank: 4, targets: [q_proj, v_proj], sync: adapters}"
    job = Job(
        tmp_path,
        *(
            "launch.processes=3",
            "launch.generators=1",
            "rollout.tensor_parallel=1",
            "sft.steps=0",
            "trainer.eval_every=0",
        ),
        *(lora, "checkpoint.every=0", f"algorithm.plugins=[{STOPPING}]", "launch.preflight=off"),
        *("watchdog.first_time_minutes=0", "watchdog.phases.wait=0.15"),
        environment={"STOP": "reward:2"},
    )
    assert job.finish() == exit_codes.STALLED
    assert processes_of(job.run_dir) == []
    [line] = [line for line in job.stderr.splitlines() if "the run hung" in line]
    assert "rank 2 (node " in line
    assert "its process is stopped" in line
