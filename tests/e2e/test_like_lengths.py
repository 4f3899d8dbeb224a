"""Steps of like lengths on the real stack: the same prompts, in other company; killed or not."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config import load_recipe
from megatron_rl.data.like_lengths import LENGTHS, LikeLengths
from megatron_rl.resume_proof.proof import differences
from megatron_rl.tasks import make_order
from megatron_rl.trainer.compatibility import check_drawn

from .job import RECIPE as BASE
from .job import Job, samples
from .test_partial import training_prompts

pytestmark = pytest.mark.engine
BLOCK, PROMPTS, STEPS = 2, 8, 8
RECIPE = (
    f"trainer.like_lengths={BLOCK}",
    f"trainer.steps={STEPS}",
    "tasks.train.sums.size=40",
    "sft.steps=15",
    "trainer.eval_every=0",
    "logging.samples_per_step=32",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never interrupted."""
    job = Job(tmp_path_factory.mktemp("like_lengths"), *RECIPE)
    job.succeed()
    return job.run_dir


def drawn(run_dir: Path, step: int) -> dict[str, float]:
    """Mean tokens of a step's responses to each prompt."""
    tokens: dict[str, list[int]] = {}
    for sample in samples(run_dir, f"step_{step}.jsonl"):
        tokens.setdefault(sample["sample"], []).append(sample["tokens"])
    return {name: float(np.mean(lengths)) for name, lengths in tokens.items()}


def test_a_block_has_the_prompts_of_the_order_and_steps_of_like_lengths(run: Path) -> None:
    train = training_prompts(run)
    order = make_order([sample.task for sample in train], None, BASE["seed"])
    last: dict[str, float] = {}
    sorted_blocks, changed = 0, 0
    for block in range(STEPS // BLOCK):
        in_order = [train[place].id for place in order.take(block * BLOCK * PROMPTS, BLOCK * PROMPTS)]
        steps = [drawn(run, block * BLOCK + number + 1) for number in range(BLOCK)]
        assert Counter(name for step in steps for name in step) == Counter(in_order)
        if not set(in_order) & set(last):
            assert [set(step) for step in steps] == [set(in_order[:PROMPTS]), set(in_order[PROMPTS:])]
        elif set(in_order) <= set(last):
            short, long = sorted(([last[name] for name in step] for step in steps), key=np.mean)
            assert max(short) <= min(long)
            sorted_blocks += 1
            changed += set(steps[0]) != set(in_order[:PROMPTS])
        for step in steps:
            last |= step
    assert sorted_blocks
    assert changed


def test_a_run_that_is_killed_within_a_block_goes_on_to_the_same_bits(run: Path, tmp_path: Path) -> None:
    killed = Job(tmp_path, *RECIPE)
    killed.wait_for_checkpoint(5)
    killed.kill()
    again = Job(tmp_path, *RECIPE)
    again.succeed()
    assert differences(run, again.run_dir) == []
    ids = [sample.id for sample in training_prompts(run)]
    content = (run / "checkpoints" / "step_7" / LENGTHS).read_bytes()
    waiting = {ids[place] for place in LikeLengths.unpack(content, ids).queue}
    assert waiting == set(drawn(run, STEPS))
    for later in range(STEPS, STEPS + 1):
        shutil.rmtree(again.run_dir / "checkpoints" / f"step_{later}")
    before = (again.run_dir / "metrics.jsonl").read_bytes()
    refused = Job(tmp_path, *RECIPE, "tasks.train.sums.size=41")
    assert refused.finish() == 1
    assert "training prompts are no longer those" in refused.stderr
    assert (again.run_dir / "metrics.jsonl").read_bytes() == before, "of step 8 too, which is not done again"
    other = Job(tmp_path, *RECIPE, "trainer.like_lengths=1")
    other.succeed()
    assert set(drawn(other.run_dir, STEPS)) == waiting, "what was taken is drawn, although the key is gone"


def test_what_was_taken_is_not_dropped(run: Path) -> None:
    folder = run / "checkpoints" / "step_7"
    config = load_recipe(run / "recipe.yaml", [])
    check_drawn(config, folder)
    config.algorithm.resample_rounds = 1
    with pytest.raises(CheckpointError, match=r"wait in it .trainer.like_lengths., and would be lost"):
        check_drawn(config, folder)
    with pytest.raises(ValueError, match="training prompts are no longer those"):
        LikeLengths.unpack((folder / LENGTHS).read_bytes(), ["another"])
