"""Claims about training: the runs that are taken, what is compared with what, what is said of it, and the page of all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reproduced import digest, fig4, gradients, runs
from reproduced.claims import MORE, NOT_MORE, SAME, Claim, Record, Side, Statement, read_record
from reproduced.page import write_figure
from reproduced.stated import CLAIMS, CONTROL
from reproduced.training_page import RECORDS, training_page, write_training

from megatron_rl.algorithms import RewardTable, make_algorithm
from megatron_rl.config import to_yaml
from megatron_rl.data.rollout import Rollout, Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.launch.job_plan import read_sweep, resolve
from megatron_rl.report import read_run
from megatron_rl.trainer.record import TokenLog, write_step, write_tokens

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reproduced"


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
            metrics = [metric for metric, _ in CLAIMS["dgpo"].measures.values()]
            value = float(name.partition("-")[0])
            rows = [
                {"step": step, "time": 1.0, **dict.fromkeys(metrics, value + 10 * (step == 1))}
                for step in (1, config.trainer.steps)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            write_recorded_step(folder)
        return 0

    claim = CLAIMS["dgpo"]
    short = replace(claim.claim, statements=claim.claim.statements[:1])
    monkeypatch.setitem(CLAIMS, "dgpo", replace(claim, claim=short, lines=claim.lines[:2], weights={1: "GRPO"}))
    monkeypatch.setattr(runs, "read_sweep", lambda path: read_sweep(path)[:2])
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    monkeypatch.setattr(runs.LocalSweep, "run", run)
    return found


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_speaks_of_lines_of_its_sweep_and_has_a_control(name: str) -> None:
    trained, lines = CLAIMS[name], read_sweep(runs.FOLDER / f"{name}.sweep")
    assert len(lines) == (1 if trained.checkpoints else len(trained.lines))
    for statement in trained.claim.statements:
        for side in (statement.first, statement.second):
            assert side.measure in trained.claim.measures
            assert 0 <= side.line < len(trained.lines)
    sources = [statement.source for statement in trained.claim.statements]
    assert CONTROL in sources
    assert set(sources) != {CONTROL}
    own = {line: first for line, first in trained.warm_up.items() if line == first} | {0: 0}
    assert set(trained.warm_up.values()) <= own.keys()
    methods = {"GRPO": "clip", "GPPO": "gppo", "DGPO": "dgpo"}
    assert all(lines[at] == f"algorithm.surrogate.name={methods[label]}" for at, label in trained.weights.items())


def test_a_seed_is_warmed_up_once_and_what_is_done_is_taken_where_its_recipe_is_the_same(
    started: list[Sequence[str]], tmp_path: Path
) -> None:
    runs.train("dgpo", [4])
    made = runs.make("dgpo", [4, 5])
    first = tmp_path / "runs/claims/dgpo/002-algorithm.surrogate.name=dgpo_seed=5/checkpoints/step_0"
    assert len(started) == 4
    assert ["sft.steps=0" in arguments for arguments in started] == [False, True, False, True]
    assert {"sft.steps=0", "model.create=null", f"model.path='{first}'"} < {*started[3]}
    numbers = made.record.numbers
    assert numbers["hard clip (GRPO)"]["entropy"] == [1.0, 3.0]
    assert numbers["hard clip (GRPO)"]["of the first"] == [11.0, 13.0]
    assert made.record.seeds == [4, 5]
    assert made.record.taken_over == 2
    assert made.record.files[-1] == "recipes/cpu/claims/undecayed.py"
    path = tmp_path / "page" / "dgpo-runs.png"
    write_figure(lambda figure: made.draw(figure, CLAIMS["dgpo"]), made.size, path)
    assert path.stat().st_size > 5000
    [changed] = tmp_path.glob("runs/claims/dgpo/001-*")
    run = read_run(changed)
    assert runs.numbers_of([run], {"all": ("actor/entropy", "all"), "none": ("loss/none", "all")}) == {"all": [6.0]}
    text = (changed / "recipe.yaml").read_text()
    (changed / "recipe.yaml").write_text(text.replace("epochs: 4", "epochs: 3"))
    with pytest.raises(SystemExit, match=r"001-.*another recipe \(trainer.epochs\)"):
        runs.train("dgpo", [4])
    (changed / "recipe.yaml").write_text(text)
    [first_run] = tmp_path.glob("runs/claims/dgpo/000-*")
    text = (first_run / "recipe.yaml").read_text()
    assert text.count("steps: 400\n") == 1
    (first_run / "recipe.yaml").write_text(text.replace("steps: 400\n", "steps: 300\n"))
    with pytest.raises(SystemExit, match=r"000-.*another recipe \(sft.steps\)"):
        runs.train("dgpo", [4])


UP, DOWN, FLAT = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], [1.0, -1.0, 2.0, -2.0, 3.0, -3.0]


@pytest.mark.parametrize(
    ("expects", "differences", "verdict"),
    [
        (MORE, UP, "holds"),
        (MORE, DOWN, "does not hold"),
        (MORE, FLAT, "not shown"),
        (MORE, UP[:5], "not shown"),  # five seeds never are enough
        (NOT_MORE, UP, "does not hold"),
        (NOT_MORE, DOWN, "holds"),
        (NOT_MORE, FLAT, "holds"),
        (SAME, [0.0] * 6, "holds"),
        (SAME, [0.0] * 5 + [1e-12], "does not hold"),
    ],
)
def test_words_follow_the_test(expects: str, differences: list[float], verdict: str) -> None:
    numbers = {"a": {"m": [0.0] * len(differences)}, "b": {"m": differences}}
    assert Statement("", Side(1, "m"), Side(0, "m"), expects, "").verdict(numbers) == verdict


def page_of(tmp_path: Path, differences: Mapping[str, list[float]]) -> str:
    """A page on a claim of two sentences: what the method has over the other, and a control over it."""
    other = {"other": {"m": [0.0] * 6}}
    record = Record(
        other | {name: {"m": each} for name, each in differences.items()}, [0, 5], "c0ffee", "day", 7.0, [], ""
    )
    record.write(tmp_path / RECORDS / "x.json")
    assert read_record(tmp_path / RECORDS / "x.json") == record
    statements = [
        Statement("More", Side(1, "m"), Side(0, "m"), MORE, "Fig. 1"),
        Statement("Gone", Side(2, "m"), Side(0, "m"), NOT_MORE, CONTROL),
    ]
    return write_training(tmp_path, {"x": Claim("A claim", "It is so.", ["m"], statements)}).read_text()


def test_the_page_says_what_the_numbers_say(tmp_path: Path) -> None:
    page = page_of(tmp_path, {"method": UP, "control": FLAT})
    assert "| [A claim](#a-claim) | It is so. | holds |" in page
    assert "| More | Fig. 1 | +3.5 (" in page
    assert ") | holds |" not in page.partition("## A claim")[0]
    assert "`python tools/reproduce.py x-runs`, seeds 0 to 5, day, commit c0ffee, 7 CPU minutes." in page
    assert "| method | 3.500 |" in page
    page = page_of(tmp_path, {"method": FLAT, "control": UP})
    assert "| holds in 0 of 2 sentences |" in page
    assert page.count("| not shown |") == page.count("| does not hold |") == 1


def test_the_page_in_the_docs_is_that_of_its_records() -> None:
    """Every sentence with the numbers beside it, and every figure; of the recipes as they are: tests/docs."""
    records = {path.stem for path in (PAGES / RECORDS).glob("*.json")}
    assert records == CLAIMS.keys()
    assert (PAGES / "training.md").read_text() == training_page(PAGES, {n: one.claim for n, one in CLAIMS.items()})
    for name, trained in CLAIMS.items():
        record = read_record(PAGES / RECORDS / f"{name}.json")
        assert list(record.numbers) == list(trained.lines)
        assert len(record.seeds) >= 8
        assert {len(values) for line in record.numbers.values() for values in line.values()} == {len(record.seeds)}
        assert not record.commit.endswith("-dirty")
        assert record.minutes <= 30, name
        assert 0 < (PAGES / f"{name}-runs.png").stat().st_size < 150_000


def test_a_digest_knows_the_code_behind_a_recipe() -> None:
    files = digest.files_behind(ROOT, runs.FOLDER / "awpo.yaml", runs.FOLDER / "awpo.sweep")
    code = [f"recipes/cpu/claims/{name}.py" for name in ("judged", "two_rewards")]
    assert files == ["recipes/cpu/claims/awpo.yaml", "recipes/cpu/claims/awpo.sweep", *code]


def drawn_by_hand() -> gradients.Drawn:
    """Three prompts with four rollouts each, whose reward is 10 times the prompt's number + the rollout's."""
    samples = [Sample(id=name, prompt="", prompt_ids=[1], task="sums") for name in "abc"]
    rollouts = Rollouts.unbegun(samples, 4)
    rollouts.held = {row: Rollout.single_turn(samples[row // 4], row % 4, [row], "stop") for row in range(12)}
    rollouts.columns, rollouts.rewards = ("right",), np.array([[10.0 * (row // 4) + row % 4] for row in range(12)])
    greedy = replace(rollouts, count=1, rewards=np.array([[1.0], [2.0], [3.0]]))
    return gradients.Drawn(rollouts, greedy, torch.tensor([1.5, 11.5, 21.5], dtype=torch.float64))


def test_a_small_batch_has_the_rollouts_that_were_chosen() -> None:
    batch = gradients.batch_of(drawn_by_hand(), [2, 0], np.array([[3, 1], [0, 2]]))
    assert batch.rollouts.rewards[:, 0].tolist() == [23, 21, 0, 2]
    assert [int(batch.rollouts.held[row].response_ids[0]) for row in range(4)] == [11, 9, 0, 2]
    assert batch.rollouts.facts["row"].tolist() == [0, 1, 2, 3]
    assert [sample.id for sample in batch.rollouts.samples] == ["c", "a"]
    assert batch.values.tolist() == [21.5, 1.5]
    assert batch.greedy.rewards[:, 0].tolist() == [3, 1]


def test_the_error_of_a_baseline() -> None:
    """RLOO's baseline is the other rollout's reward."""
    table = RewardTable(torch.tensor([[[1.0], [3.0]], [[0.0], [2.0]]], dtype=torch.float64), ("right",))
    advantages = make_algorithm({"estimator": {"name": "rloo"}}).compute_advantages(table).advantages
    wanted = ((3 - 2) ** 2 + (1 - 2) ** 2 + (2 - 0) ** 2 + (0 - 0) ** 2) / 4
    values = torch.tensor([2.0, 0.0], dtype=torch.float64)
    assert gradients.baseline_error(table, advantages, values) == pytest.approx(wanted)


def test_every_estimator_sees_the_same_small_batches() -> None:
    one, other, third = (
        [(which, chosen.tolist()) for which, chosen in gradients.small_batches(gradients.PROMPTS, 4, seed)]
        for seed in (0, 0, 1)
    )
    assert one == other != third
    assert len(one) == gradients.BATCHES
    for which, chosen in one:
        assert len(set(which)) == gradients.BATCH
        assert all(len(set(rollouts)) == 4 for rollouts in chosen)


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
