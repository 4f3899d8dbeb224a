"""Win rates against a baseline: the verdicts, Arena-Hard's arithmetic, and a judge over HTTP."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config import ConfigError, check, load_recipe
from megatron_rl.config.machine import Machine
from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.rollout import ScoredLength
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation.answers import guarded
from megatron_rl.evaluation.summary import metrics_of, summarize
from megatron_rl.evaluation.win_rates import battles, controlled_win_rate, logistic_fit, win_rate
from megatron_rl.rewards import make_reward
from megatron_rl.rewards.pairwise import COLUMNS, difference, read_verdict
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.trainer.report import Reporter
from tests.rewards.chat_server import serving

NAN = math.nan


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("A is clearer. My final verdict: [[A>>B]]", 2),
        ("<think>[[A>>B]]? No.</think>\nB is clearer: [[B>A]]", -1),
        ("<think>[[A>>B]]? But", None),
        ("[[A>B]] ... so [[A>B]]", 1),
        ("[[A=B]]", 0),
        ("[[B=A]]", 0),
        ("[[A<B]]", -1),
        ("[[B>A]]", -1),
        ("[[B>>A]]", -2),
        ("[[B<<A]]", 2),
        ("first [[A>B]], then [[B>A]]", None),
        ("[[A>>>B]]", None),
        ("A>B", None),
        ("", None),
    ],
)
def test_a_verdict_is_the_one_label_of_a_judgment(text: str, verdict: int | None) -> None:
    assert read_verdict(text) == verdict


def recorded(seed: int, count: int = 500) -> list[tuple[float, float]]:
    """Verdicts of a judge that likes the response more often than not, and whatever comes first."""
    rng = np.random.default_rng(seed)
    chances = [0.1, 0.2, 0.2, 0.3, 0.2], [0.2, 0.25, 0.2, 0.25, 0.1]
    first, second = (rng.choice([-2.0, -1.0, 0.0, 1.0, 2.0], count, p=p) for p in chances)
    return [*zip(first.tolist(), second.tolist(), strict=True)]


def published(pairs: list[tuple[float, float]], rounds: int = 4000) -> tuple[float, float, float]:
    """The published way with its own tables of labels: each verdict as a list of scores, exploded, drawn with replacement."""
    scores = {2: [1] * 3, 1: [1], 0: [0.5], -1: [0], -2: [0] * 3}
    exploded = np.array([score for pair in pairs for verdict in pair for score in scores[int(verdict)]], dtype=float)
    rng = np.random.default_rng(11)
    means = np.array([rng.choice(exploded, len(exploded)).mean() for _ in range(rounds)])
    return means.mean(), *np.quantile(means, [0.05, 0.95])


def bradley_terry(pairs: list[tuple[float, float]]) -> float:
    """Version 0.1: the strength that logistic regression without penalty finds, as a probability of winning."""
    outcomes = np.array([outcome for pair in pairs for outcome in battles(pair)])
    strength = 0.0
    for _ in range(50):  # Newton
        p = 1 / (1 + math.exp(-strength))
        strength += (outcomes.mean() - p) / (p * (1 - p))
    return 1 / (1 + math.exp(-strength))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_win_rate_of_recorded_verdicts_is_the_published_one(seed: int) -> None:
    pairs = recorded(seed)
    found = win_rate(pairs)
    mean, low, high = published(pairs)
    assert found is not None
    assert found.value == pytest.approx(mean, abs=0.004)  # of 100 draws
    assert found.value == pytest.approx(bradley_terry(pairs), abs=0.004)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))
    assert found.prompts == 500
    assert win_rate(pairs) == found, "another draw"


def test_weights_ties_and_missing_verdicts() -> None:
    assert battles([2.0, 1.0, 0.0, -1.0, -2.0]) == [1, 1, 1, 1, 0.5, 0, 0, 0, 0]
    won = win_rate([(2.0, 1.0), (NAN, -2.0), (-2.0, NAN)])
    assert won is not None
    assert (won.value, won.low, won.high, won.prompts) == (1.0, 1.0, 1.0, 1)
    assert win_rate([(NAN, 1.0)]) is None


def styled(count: int = 600) -> tuple[list[tuple[float, float]], list[list[float]]]:
    """A judge for whom a response is as good as the baseline's, but who likes what is longer, and responses that are."""
    rng = np.random.default_rng(3)
    styles = rng.normal([0.3, 0, 0, 0], [0.2, 0.01, 0.02, 0], (count, 4))
    wins = rng.random((2, count)) < 1 / (1 + np.exp(-6 * styles[:, 0]))
    first, second = np.where(wins, 1.0, -1.0)
    return [*zip(first.tolist(), second.tolist(), strict=True)], styles.tolist()


def test_style_control_takes_out_what_a_judge_likes_of_style() -> None:
    pairs, styles = styled()
    plain, controlled = win_rate(pairs), controlled_win_rate(pairs, styles)
    assert plain is not None
    assert controlled is not None
    assert plain.value > 0.8
    assert controlled.low is not None
    assert controlled.high is not None
    assert controlled.low < 0.5 < controlled.high
    assert controlled.high - controlled.low < 0.15
    assert controlled_win_rate(pairs, styles) == controlled, "another draw"
    same = controlled_win_rate(pairs, [[0.0] * 4] * len(pairs))  # no difference of style: the plain one
    assert same is not None
    assert same.value == pytest.approx(plain.value, abs=0.005)
    assert controlled_win_rate([(NAN, 1.0)], [[0.0] * 4]) is None
    won = controlled_win_rate([(2.0, 1.0)] * 20, [[i / 20] * 4 for i in range(20)])
    assert won is not None
    assert won.value > 0.99


@pytest.mark.parametrize("constant", [-1 / 31, 1 / 3, 7e9, 1e-12])
def test_a_feature_that_is_the_same_everywhere_says_nothing(constant: float) -> None:
    """Answers of one pattern have the same density of lists. The deviation of equal numbers is rounding, and not 0."""
    pairs, styles = styled()
    with_it = [[*style[:1], constant, *style[1:], constant * (1 + 1e-13)] for style in styles]
    assert controlled_win_rate(pairs, with_it) == controlled_win_rate(pairs, styles)
    won = controlled_win_rate([(2.0, 2.0)] * 50, [[constant, constant]] * 50)
    assert won is not None
    assert won.value > 0.999
    single = controlled_win_rate([(2.0, -1.0)], [[constant, 0.1, constant, -0.7]])  # two battles of one style
    assert single is not None
    assert single.value > 0.6


def test_the_fit_is_the_maximum_of_the_likelihood() -> None:
    """Apart from the code: torch's LBFGS, which the authors use, on the loss in float64."""
    pairs, styles = styled()
    x = torch.tensor([[1.0, *style[:3]] for style in styles for _ in range(2)], dtype=torch.float64)
    y = torch.tensor([float(verdict > 0) for pair in pairs for verdict in pair], dtype=torch.float64)
    found = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [found], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        solver.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(x @ found, y, reduction="sum")
        value = value + 0.5e-3 * found.square().sum()
        value.backward()
        return value

    solver.step(loss)  # type: ignore[arg-type]
    assert logistic_fit(x.numpy(), y.numpy()) == pytest.approx(found.detach().numpy(), rel=1e-5)


def test_a_style_that_few_answers_have_does_not_keep_the_fit_from_its_maximum() -> None:
    """Newton's whole steps leave the likelihood's slope behind them where most of a feature's values are 0, and the model
    hardly wins."""
    rng = np.random.default_rng(50)
    styles = np.where(rng.random((100, 4)) < 0.06, rng.normal(0, 0.02, (100, 4)), 0.0)
    styles[:, 0] = rng.normal(-0.3, 0.2, 100)
    verdicts = np.clip(np.round(rng.normal(-1.5 + 2 * styles[:, :1], 0.6, (100, 2))), -2, 2)
    controlled = controlled_win_rate([(first, second) for first, second in verdicts.tolist()], styles.tolist())
    assert controlled is not None
    assert 0 < controlled.value < 0.05
    x, y = np.column_stack([np.ones(100), styles / styles.std(axis=0)]), (verdicts[:, 0] > 0).astype(float)
    for draw in rng.integers(0, 100, (200, 100)):
        found = logistic_fit(x[draw], y[draw])
        slope = x[draw].T @ (y[draw] - 1 / (1 + np.exp(-x[draw] @ found))) - 1e-3 * found
        assert np.abs(slope).max() < 1e-6


def test_style_is_length_and_markdown_outside_code() -> None:
    own = "# Title\n\n- one\n- two\n1. three\n**bold** and __bold__\n```\n# no title\n- no list\n```\n"
    assert difference(own, own) == dict.fromkeys(COLUMNS, 0.0)
    found = difference(own, "x" * 50)
    density = {name: count / len(own) for name, count in (("headers", 1), ("lists", 3), ("bold", 2))}
    assert found == pytest.approx(
        {"length": (len(own) - 50) / (len(own) + 50), **{name: d / (d + 1) for name, d in density.items()}}
    )
    assert difference("x" * 50, own) == pytest.approx({name: -value for name, value in found.items()})


def rewards_at(url: str) -> dict[str, RewardConfig]:
    return {
        f"as_{position}": RewardConfig("pairwise", params={"urls": url, "model": "judge", "position": position})
        for position in "AB"
    }


def test_a_judge_is_asked_in_both_orders() -> None:
    def behave(_: int, body: dict[str, Any]) -> str:
        """Prefers what has the word `good`, and what stands first among equals."""
        first, second = (part.partition("</answer")[0] for part in body["messages"][1]["content"].split("<answer_")[1:])
        if "good" in first and "good" not in second:
            return "say:[[A>>B]]"
        return "say:[[B>A]]" if "good" in second and "good" not in first else "say:[[A>B]]"

    sample = {"prompt": "Tell me.", "metadata": {"baseline": "a good answer"}}
    with serving(behave) as server:
        as_a, as_b = (make_reward("pairwise", **config.params) for config in rewards_at(server.url).values())
        assert [(as_a(text, sample), as_b(text, sample)) for text in ("bad", "good")] == [(-1, -2), (1, -1)]
    with pytest.raises(ValueError, match="its metadata has no text 'baseline'"):
        as_a.check_sample({"prompt": "Tell me."})
    with pytest.raises(ValueError, match="model = '', must be a text"):
        make_reward("pairwise", urls="http://localhost", model="", position="A")


def test_an_evaluation_has_the_win_rate(tmp_path: Any) -> None:
    (tmp_path / "recipe.yaml").write_text("run_dir: runs/x\n")
    config = load_recipe(tmp_path / "recipe.yaml")
    config.rewards = rewards_at("http://localhost:1/v1")
    config.evaluation.pairwise = ["as_A", "as_B"]
    samples = [Sample(f"t/{i}", "t", "p", [1]) for i in range(3)]
    verdicts = [(2.0, 2.0), (1.0, 1.0), (0.0, NAN)]
    outcomes = [
        ScoredLength(sample.id, 3, "stop", {"as_A": a, "as_B": b})
        for sample, (a, b) in zip(samples, verdicts, strict=True)
    ]
    metrics = metrics_of([summarize(config, "t", samples, outcomes)], {})
    assert metrics["eval/t/win_rate"] == 1.0
    config.rewards["look"], config.evaluation.style = RewardConfig("style"), "look"
    for outcome in outcomes:
        outcome.rewards.update({f"look.{name}": 0.0 for name in COLUMNS})
    assert metrics_of([summarize(config, "t", samples, outcomes)], {})["eval/t/win_rate_controlled"] > 0.99
    config.evaluation.style = "as_A"
    with pytest.raises(ConfigError, match=r"`evaluation.style` is 'as_A'; it must name a reward `style`"):
        check(config, machine=Machine(), command="evaluate")
    config.evaluation.pairwise = ["as_A", "as_A"]
    with pytest.raises(ConfigError, match=r"`evaluation.pairwise` must name two `pairwise` rewards, with position A"):
        check(config, machine=Machine(), command="evaluate")


def test_an_equation_without_a_solution_is_no_fault_of_the_recipe(tmp_path: Any) -> None:
    """numpy's LinAlgError is a ValueError, which else means that the recipe or its data cannot run (exit code 2)."""
    (tmp_path / "recipe.yaml").write_text(f"run_dir: {tmp_path}\n")
    log = Reporter(load_recipe(tmp_path / "recipe.yaml"), tmp_path, ALONE, "evaluate")
    with pytest.raises(np.linalg.LinAlgError):
        guarded(log, lambda: int(np.linalg.solve(np.zeros((1, 1)), np.ones(1))[0]))
