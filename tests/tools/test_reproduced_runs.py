"""Pages on claims that take training: the runs that are started, what is compared with what, and what is drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reproduced import fig4, runs
from reproduced.page import write_page

from megatron_rl.algorithms import RewardTable, make_algorithm
from megatron_rl.config import to_yaml
from megatron_rl.launch.job_plan import read_sweep, resolve
from megatron_rl.report import read_run
from megatron_rl.report.significance import paired_difference
from megatron_rl.trainer.record import TokenLog, write_step, write_tokens

ROOT = Path(__file__).parents[2]


def write_recorded_step(run_dir: Path) -> None:
    """Two prompts with a right and a wrong rollout of a token each, whose ratios are 2 and 1/2."""
    table = RewardTable(torch.tensor([[[1.0], [0.0]]] * 2, dtype=torch.float64), ("right",), lengths=torch.ones(2, 2))
    log = TokenLog()
    for row in range(4):
        old = np.array([np.log(0.25)], dtype=np.float32)
        new = old + np.float32(np.log(2.0) * (1 - 2 * (row % 2)))
        log.rows[row] = {"log_probs": new, "old_log_probs": old, "rollout_log_probs": old, "gradient_weights": old}
    path = run_dir / "rollouts" / "step_10.npz"
    write_tokens(path, 0, np.arange(4), log)
    estimate = make_algorithm("grpo").compute_advantages(table)
    write_step(path, list("ab"), table, torch.zeros(2, 2, dtype=torch.bool), estimate, parts=1)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Arguments of the runs that are started; each leaves what a run does, with the number of its line as every metric."""
    found: list[Sequence[str]] = []

    def run(self: runs.LocalSweep) -> int:
        for name, arguments in self.runs.items():
            found.append(arguments)
            [folder] = [Path(one.removeprefix("run_dir=")) for one in arguments if one.startswith("run_dir=")]
            folder.mkdir(parents=True)
            config = resolve("train", arguments[1], [one for one in arguments[2:] if "model." not in one], None)
            (folder / "recipe.yaml").write_text(to_yaml(config))
            metrics = [metric for metric, _ in runs.CLAIMS["dgpo"].measures.values()]
            value = float(name.partition("-")[0])
            rows = [
                {"step": step, "time": 1.0, **dict.fromkeys(metrics, value + 10 * (step == 1))}
                for step in (1, config.trainer.steps)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            write_recorded_step(folder)
        return 0

    claim = replace(runs.CLAIMS["dgpo"], baselines=(None, 0), weights={1: "GRPO"})
    monkeypatch.setitem(runs.CLAIMS, "dgpo", claim)
    monkeypatch.setattr(runs, "read_sweep", lambda path: read_sweep(path)[:2])
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    monkeypatch.setattr(runs.LocalSweep, "run", run)
    return found


@pytest.mark.parametrize("name", runs.CLAIMS)
def test_every_claim_compares_lines_of_its_sweep(name: str) -> None:
    claim, lines = runs.CLAIMS[name], read_sweep(runs.FOLDER / f"{name}.sweep")
    assert len(claim.baselines) == len(lines)
    assert all(of is None or of < number for number, of in enumerate(claim.baselines))
    surrogates = {"GRPO": "clip", "GPPO": "gppo", "DGPO": "dgpo"}
    assert all(
        lines[at] == f"algorithm.surrogate.name={surrogates[label]}" for at, label in (claim.weights or {}).items()
    )
    page = (ROOT / "docs" / "reproduced" / "training.md").read_text()
    by_hand = f"megatron-rl sweep recipes/cpu/claims/{name}.sweep recipes/cpu/claims/{name}.yaml --seeds "
    assert by_hand in page or f"tools/reproduce.py {name}-runs --seeds " in page


def test_a_seed_is_warmed_up_once_and_what_is_done_is_taken_where_its_recipe_is_the_same(
    started: list[Sequence[str]], tmp_path: Path
) -> None:
    runs.train("dgpo", 1)
    page = runs.make("dgpo", 2)
    first = tmp_path / "runs/claims/dgpo/002-algorithm.surrogate.name=dgpo_seed=1/checkpoints/step_0"
    assert len(started) == 4
    assert not any("sft.steps=0" in started[number] for number in (0, 2))
    assert {"sft.steps=0", "model.create=null", f"model.path='{first}'"} < {*started[3]}
    line = "clip` | 2.000 | no difference shown: +1, p = 0.5 | `algorithm.surrogate.name=dgpo` |"
    assert page.text("dgpo-runs").count(line) == len(runs.CLAIMS["dgpo"].measures)
    run = read_run(next(tmp_path.glob("runs/claims/dgpo/001-*")))
    assert [runs.number_of(run, ("actor/entropy", of)) for of in (runs.LAST, runs.ALL)] == [1.0, 6.0]
    write_page(page, "dgpo-runs", tmp_path)
    assert (tmp_path / "dgpo-runs.png").stat().st_size > 5000
    [changed] = tmp_path.glob("runs/claims/dgpo/001-*")
    text = (changed / "recipe.yaml").read_text()
    (changed / "recipe.yaml").write_text(text.replace("epochs: 4", "epochs: 3"))
    with pytest.raises(SystemExit, match=r"001-.*another recipe \(trainer.epochs\)"):
        runs.train("dgpo", 1)


def test_words_follow_the_test() -> None:
    up = paired_difference([0.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    down = paired_difference([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0] * 6)
    five = paired_difference([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    words = [runs.verdict(one).partition(":")[0] for one in (up, down, five, None)]
    assert words == ["more", "less", "no difference shown", ""]


@pytest.mark.parametrize(
    ("surrogate", "weights"), [("clip", (0.0, 0.0)), ("gppo", (0.6, 1.6)), ("dgpo", (0.77460, 0.625))]
)
def test_weights_of_recorded_tokens(tmp_path: Path, surrogate: str, weights: tuple[float, float]) -> None:
    """By hand, at the ratios 2 (A > 0) and 1/2 (A < 0): F / w."""
    write_recorded_step(tmp_path)
    (tmp_path / "recipe.yaml").write_text(f"algorithm: {{surrogate: {{name: {surrogate}, params: {{}}}}}}")
    tokens = fig4.tokens_of(tmp_path)
    assert tokens.probability.tolist() == pytest.approx([0.25] * 4)
    assert tokens.ratio.tolist() == pytest.approx([2.0, 0.5] * 2)
    assert tokens.weight.tolist() == pytest.approx(weights * 2, abs=1e-4)
    line = f"| 50.0% | 50.0% | 0.500 | 2.000 | - | 0.250 | 0.250 | {weights[1]:.3f} |"
    assert line in fig4.weights_table({"x": tmp_path})
