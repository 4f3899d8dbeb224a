"""The rule: every metric of docs/metrics.md is recomputed from what a real run recorded, by a second way (`figures`)."""

from __future__ import annotations

import ast
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_rl.config.load import algorithm_config
from tests.evaluation.recomputed import evaluation

from . import inside
from .conftest import Finished
from .figures import ROOT, TABLE, Elsewhere, Measured, agrees, documented, expected, wrong
from .job import RECIPE, rows, samples
from .recorded_steps import Policy, Step

STEPS = RECIPE["trainer"]["steps"]
ELSEWHERE = {name for name, entry in TABLE.items() if isinstance(entry, Elsewhere)}
# What runs on a CPU do not have.
OF_A_GPU = {"memory/device_peak_gib", "memory/<phase>/device_peak_gib"}


def test_every_documented_metric_is_recomputed() -> None:
    """A new metric needs a second way to compute it, or the reason why there is none."""
    assert documented() == TABLE.keys()
    for name, entry in TABLE.items():
        if isinstance(entry, Measured):
            assert entry.why, name
        if isinstance(entry, Elsewhere):
            file, _, test = entry.test.partition("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, entry.test


def steps_of(
    run_dir: Path, sections: dict[int, Any], minibatches: dict[int, int], policies: dict[str, Any]
) -> list[Step]:
    """The recorded steps; `policies`: by what they are of which steps."""
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    found, table = [], {int(row["step"]): row for row in rows(run_dir)}
    for number, row in table.items():
        if not (run_dir / "rollouts" / f"step_{number}.npz").is_file():
            continue
        trainer = recipe["trainer"] | {"minibatches": minibatches.get(number, recipe["trainer"]["minibatches"])}
        algorithm = asdict(algorithm_config(sections[number])) if number in sections else recipe["algorithm"]
        models = {which: policy for which, (policy, of) in policies.items() if number in of}
        before = table.get(number - 1) if number not in sections else None
        found.append(Step(run_dir, row, before, {**recipe, "trainer": trainer, "algorithm": algorithm}, **models))
    return found


@pytest.mark.engine
def test_every_metric_of_real_steps_is_what_the_recorded_rollouts_say(variants: Path, straight: Finished) -> None:
    names = list(inside.VARIANTS)
    sections = {number: inside.VARIANTS[name] for number, name in enumerate(names, 1)}
    small = {number: inside.MINIBATCHES[name] for number, name in enumerate(names, 1) if name in inside.MINIBATCHES}
    start, base = Policy(variants / "export"), Policy(straight.run_dir / "reference")
    steps = steps_of(
        variants,
        sections,
        small,
        {"policy": (start, {1}), "reference": (start, {1, 1 + names.index("kl loss"), 1 + names.index("kl reward")})},
    )
    assert len(steps) == len(names)
    steps += steps_of(straight.run_dir, {}, {}, {"reference": (base, range(STEPS + 1))})
    seen, lies, blind = set[str](), list[str](), list[str]()
    for step in steps:
        found = expected(step)
        seen |= {pattern for pattern, _ in found.values()}
        lies += wrong(step, found)
        blind += [  # a number that is off by half of itself has to be seen
            name
            for name, (pattern, own) in found.items()
            if not isinstance(own, tuple) and agrees(pattern, own, step.row[name] + max(abs(step.row[name]) / 2, 1e-3))
        ]
    assert not lies, "\n".join(lies)
    assert not blind
    missing = TABLE.keys() - ELSEWHERE - OF_A_GPU - seen
    assert not missing, "no step of these runs shows them"


@pytest.mark.engine
def test_the_held_out_prompts_say_what_the_evaluation_did(straight: Finished) -> None:
    for row in rows(straight.run_dir):
        if row["step"] in (0, STEPS):
            records = samples(straight.run_dir, f"eval_held_out_step_{row['step']}.jsonl")
            own = evaluation(records, "correct", 1.0, 1, [1])
            found = {name: row[name] for name in row if name.startswith("eval/held_out/")}
            assert found == pytest.approx({f"eval/held_out/{name}": value for name, value in own.items()})


@pytest.mark.engine
def test_a_step_of_fine_tuning_a_second_time(variants: Path) -> None:
    """The first: of the model that the run made, on the demonstrations that come first."""
    from megatron_rl.config import load_recipe
    from megatron_rl.tasks import make_order
    from megatron_rl.tasks.loading import load_prompts

    config, policy = load_recipe(variants / "recipe.yaml"), Policy(variants / "model")
    examples = [one for one in load_prompts(config, policy.tokenizer, print, True, None).train if one.demonstration]
    chosen = make_order([one.task for one in examples], None, config.seed).take(0, config.sft.batch_size)
    losses = []
    for i in chosen:
        ids = policy.tokenizer(examples[i].demonstration, add_special_tokens=False)["input_ids"]
        pieces = [policy.tokenizer.decode([one]) for one in [*ids, policy.tokenizer.eos_token_id]]
        losses += (-policy.score(examples[i].prompt, pieces)[0]).tolist()
    first = rows(variants, "sft/metrics.jsonl")[0]
    assert first["sft/tokens"] == len(losses)
    assert first["sft/loss"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.engine
def test_what_saves_took_is_what_lies_there(straight: Finished) -> None:
    table = rows(straight.run_dir)
    told = [row for row in table if "checkpoint/bytes" in row]
    assert told
    for row in told:
        assert 0 <= row["checkpoint/blocked_s"] < 60
        assert 0 < row["checkpoint/write_s"] < 60
    folders = list((straight.run_dir / "checkpoints").iterdir())
    size = sum(file.stat().st_size for file in folders[0].glob("*.distcp"))
    for row in told:  # of one save, or of several that ended in the step; files have headers and padding beside
        saves = max(1, round(row["checkpoint/bytes"] / size))
        assert 0.8 * size < row["checkpoint/bytes"] / saves <= size
