"""Partial rollouts on the real stack: exact in what they train on, whatever the engines, killed or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron_rl.checkpoint.convert import open_weights
from megatron_rl.config import load_recipe
from megatron_rl.data.rollout import Segment
from megatron_rl.data.sample import Sample
from megatron_rl.resume_proof.proof import differences
from megatron_rl.rollout.partial import Waiting, unpack
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.tasks import make_order
from megatron_rl.tasks.loading import load_prompts

from .job import RECIPE, Job, rows, samples

pytestmark = pytest.mark.engine
STEPS = RECIPE["trainer"]["steps"]
PARTIAL = ("rollout.partial={chunk_tokens: 3, open_prompts: 16}", "sft.steps=15", "trainer.eval_every=0")
EVERY_SAMPLE = "logging.samples_per_step=32"
TOLERANCE = 2e-4  # of a log-prob in float32 by other kernels, over two layers; a step of training changes them by more


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks of one engine; never interrupted."""
    job = Job(tmp_path_factory.mktemp("partial"), *PARTIAL, EVERY_SAMPLE)
    job.succeed()
    return job.run_dir


def training_prompts(run_dir: Path) -> list[Sample]:
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    return load_prompts(load_recipe(run_dir / "recipe.yaml", []), tokenizer, lambda _: None, True).train


def waiting_of(run_dir: Path, step: int) -> Waiting:
    train = training_prompts(run_dir)
    order = make_order([sample.task for sample in train], None, RECIPE["seed"])
    content = (run_dir / "checkpoints" / f"step_{step}" / "waiting.npz").read_bytes()
    return unpack(content, ALONE, lambda position: train[order.take(position, 1)[0]])


def policy_of(run_dir: Path, step: int) -> Any:
    folder = run_dir / "checkpoints" / f"step_{step}"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    weights = open_weights(folder)
    missing, unexpected = model.load_state_dict(
        {name: weights.read(name, 0, 0, weights.shape(name)[0]) for name in weights.names()}, strict=False
    )
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


def score(model: Any, given: np.ndarray, segment: Segment) -> np.ndarray:
    """Log-probs of a segment's tokens behind those before."""
    ids = torch.from_numpy(np.concatenate([given, segment.ids]))
    with torch.no_grad():
        every = model(ids[None]).logits[0, len(given) - 1 : -1].log_softmax(-1)
    return every.gather(1, ids[len(given) :, None])[:, 0].numpy()


def test_every_waiting_token_was_drawn_by_the_weights_that_it_names(run: Path) -> None:
    """By transformers, with the weights of each version's checkpoint; those of a step before or after give other numbers."""
    policies, updates = {step: policy_of(run, step) for step in range(STEPS + 1)}, RECIPE["trainer"]["minibatches"]
    several, seen = 0, set[int]()
    wrong: dict[int, list[float]] = {-1: [], 1: []}
    for step in range(1, STEPS + 1):
        for rollout in waiting_of(run, step).rollouts.held.values():
            several += len({segment.version for segment in rollout.segments[1:]}) > 1
            given = rollout.prompt_ids
            for segment in rollout.segments[1:]:
                assert segment.logprobs is not None
                drawn_after = segment.version // updates
                seen.add(drawn_after)
                difference = np.abs(score(policies[drawn_after], given, segment) - segment.logprobs)
                assert difference.max() < TOLERANCE, (step, rollout.sample_id, rollout.index, segment.version)
                for off in (other for other in wrong if drawn_after + other in policies):
                    by_other = score(policies[drawn_after + off], given, segment)
                    wrong[off].append(float(np.abs(by_other - segment.logprobs).max()))
                given = np.concatenate([given, segment.ids])
    assert several, "rollouts that several versions drew"
    assert seen >= {0, 1, 2}
    for off, differences_ in wrong.items():
        assert np.median(differences_) > 10 * TOLERANCE, f"a version off by {off} would not be seen"


def test_a_run_that_is_killed_while_responses_wait_goes_on_to_the_same_bits(run: Path, tmp_path: Path) -> None:
    """From a checkpoint of another layout's beginning, too: two engines of one rank draw what one of two ranks does."""
    killed = Job(tmp_path, *PARTIAL, EVERY_SAMPLE)
    killed.wait_for_checkpoint(2)
    killed.kill()
    again = Job(tmp_path, *PARTIAL, EVERY_SAMPLE)
    again.succeed()
    assert differences(run, again.run_dir) == []
    last = Path("checkpoints") / f"step_{STEPS}"
    assert (run / last / "waiting.npz").read_bytes() == (again.run_dir / last / "waiting.npz").read_bytes()
    for later in (3, 4):
        shutil.rmtree(again.run_dir / "checkpoints" / f"step_{later}")
    other = Job(tmp_path, *PARTIAL, EVERY_SAMPLE, "rollout.tensor_parallel=1", "trainer.steps=3")
    other.succeed()
    drawn, same = (samples(folder, "step_3.jsonl") for folder in (again.run_dir, run))
    assert [one["response"] for one in drawn] == [one["response"] for one in same], "what waited went on in two engines"
    row, wanted = (rows(folder)[3] for folder in (again.run_dir, run))
    names = [name for name in row if name.startswith("rollouts/")]
    assert names
    assert {name: row[name] for name in names} == {name: wanted[name] for name in names}


def test_a_run_without_partial_rollouts_does_not_drop_what_waits(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    job = Job(tmp_path, "trainer.steps=5", "sft.steps=15")
    assert job.finish() != 0
    assert "responses wait in it, whose prompts would be lost" in job.stderr + job.stdout
