"""Shrinkage baseline, Fig. 9-12 in simulation: error of the baseline, variance of the gradient, lambda over heterogeneity.

The policy is small enough for its exact gradient: every prompt has K possible answers, one of them right, with
probabilities softmax(theta . features + offset). Features are random, theta is shared, and the right answer's offset sets how
hard a prompt is. A response is an answer and its wording: standard normal draws around parameters of their own, on which the
reward does not depend, so that their score is the draw itself and their true gradient 0. Expectations are over rollouts, for
one fixed set of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.algorithms import RewardTable, make_advantage_estimator
from reproduced.page import Page, markdown_table
from reproduced.theory import oracle_lambda

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROMPTS, ANSWERS, FEATURES, WORDING, BATCHES = 64, 8, 32, 96, 400
ROLLOUTS = (2, 4, 8)
SPREADS = {"low": 0.3, "medium": 1.5, "high": 4.0}  # standard deviation of the right answers' offsets
PAPER = {"mse": ("39.4", "25.1", "13.4"), "gradient": ("12.5", "8.6", "5.7")}
BASELINES: dict[str, tuple[str, dict[str, bool]]] = {
    "RLOO": ("rloo", {}),
    "REINFORCE++ (batch mean)": ("reinforce_pp", {"normalize": False}),
    "BLOO": ("bloo", {}),
    "ReMax": ("remax", {}),
    "shrinkage": ("shrinkage", {}),
}


@dataclass
class Bandit:
    """Prompts and a policy over their answers."""

    probabilities: Tensor  # float64 [n, K]
    scores: Tensor  # float64 [n, K, d], gradient of each answer's log-probability with respect to theta
    right: Tensor  # int64 [n], the right answer

    @property
    def values(self) -> Tensor:
        """mu_i, the probability of being right, [n]."""
        return self.probabilities.gather(1, self.right[:, None])[:, 0]

    @property
    def gradient(self) -> Tensor:
        """The exact policy gradient, [d]."""
        chosen = self.scores.gather(1, self.right[:, None, None].expand(-1, 1, self.scores.shape[2]))[:, 0]
        return (self.values[:, None] * chosen).mean(0)


def make_bandit(spread: float, seed: int = 0, prompts: int = PROMPTS) -> Bandit:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(prompts, ANSWERS, FEATURES, generator=generator, dtype=torch.float64)
    theta = torch.randn(FEATURES, generator=generator, dtype=torch.float64) * 0.1
    right = torch.randint(ANSWERS, (prompts,), generator=generator)
    logits = features @ theta
    ease = 2.0 + spread * torch.randn(prompts, generator=generator, dtype=torch.float64)
    logits = logits.scatter_add(1, right[:, None], ease[:, None])
    probabilities = logits.softmax(1)
    scores = features - (probabilities[:, :, None] * features).sum(1, keepdim=True)
    return Bandit(probabilities, scores, right)


@dataclass
class Result:
    """Means over batches, by baseline."""

    mse: dict[str, float]  # squared error of the baseline against mu
    answer: dict[str, float]  # squared distance to the exact gradient, of the parameters that choose the answer
    response: dict[str, float]  # the same of all parameters, the wording's among them
    shrinkage: float  # mean of the estimated lambda


def simulate(
    bandit: Bandit, rollouts: int, baselines: dict[str, Callable[[RewardTable], Tensor]], seed: int = 1
) -> Result:
    """Draws batches. `baselines`: label -> function from a reward table to advantages [n, m]."""
    generator = torch.Generator().manual_seed(seed)
    zeros = dict.fromkeys(baselines, 0.0)
    result = Result(dict(zeros), dict(zeros), dict(zeros), 0.0)
    greedy = (bandit.probabilities.argmax(1) == bandit.right).double()[:, None]
    exact, values = bandit.gradient, bandit.values[:, None]
    estimator = make_advantage_estimator("shrinkage")
    width, count = bandit.scores.shape[2], len(values) * rollouts
    for _ in range(BATCHES):
        drawn = torch.multinomial(bandit.probabilities, rollouts, replacement=True, generator=generator)
        wording = torch.randn(count, WORDING, generator=generator, dtype=torch.float64)
        rewards = (drawn == bandit.right[:, None]).double()
        table = RewardTable(rewards[:, :, None], ("right",), greedy=greedy)
        scores = bandit.scores.gather(1, drawn[:, :, None].expand(-1, -1, width)).reshape(count, width)
        result.shrinkage += float(estimator(table).group["shrinkage"].mean()) / BATCHES
        for label, advantages_of in baselines.items():
            advantages = advantages_of(table)
            answer = float((advantages.flatten() @ scores / count - exact).square().sum())
            result.mse[label] += float((rewards - advantages - values).square().mean()) / BATCHES
            result.answer[label] += answer / BATCHES
            noise = float((advantages.flatten() @ wording / count).square().sum())
            result.response[label] += (answer + noise) / BATCHES
    return result


def by_name(name: str, params: dict[str, bool]) -> Callable[[RewardTable], Tensor]:
    estimator = make_advantage_estimator(name, **params)
    return lambda table: estimator(table).advantages


def fixed(shrinkage: float) -> Callable[[RewardTable], Tensor]:
    """The two-level baseline with a lambda that is given instead of estimated."""
    rloo, bloo = by_name("rloo", {}), by_name("bloo", {})
    return lambda table: (1 - shrinkage) * rloo(table) + shrinkage * bloo(table)


def oracle(bandit: Bandit, rollouts: int) -> float:
    values = bandit.values
    return oracle_lambda(len(values), rollouts, float((values * (1 - values)).mean()), float(values.var(correction=0)))


def fall(values: dict[str, float], label: str = "shrinkage") -> str:
    return f"{1 - values[label] / values['RLOO']:.1%}"


def _rows(
    results: dict[int, Result], pick: Callable[[Result], dict[str, float]], paper: str, relative: bool
) -> list[list[object]]:
    table: list[list[object]] = []
    for label in BASELINES:
        values = [pick(results[m]) for m in ROLLOUTS]
        table.append([label, *(each[label] / (each["RLOO"] if relative else 1) for each in values)])
    table.append(["shrinkage below RLOO", *(fall(pick(results[m])) for m in ROLLOUTS)])
    table.append(["the paper, on its data", *(f"{value}%" for value in PAPER[paper])])
    return table


def _draw(
    results: dict[int, Result],
    lambdas: dict[str, list[float]],
    grid: list[float],
    sweeps: dict[str, list[float]],
    figure: Figure,
) -> None:
    axes = figure.subplots(1, 4)
    for label in BASELINES:
        axes[0].plot(ROLLOUTS, [results[m].mse[label] for m in ROLLOUTS], marker="o", label=label)
        axes[1].plot(ROLLOUTS, [results[m].response[label] for m in ROLLOUTS], marker="o", label=label)
    for label, row in lambdas.items():
        axes[2].plot(ROLLOUTS, row, marker="o", label=label)
        axes[3].plot(grid, sweeps[label], marker=".", label=label)
    titles = ("error of the baseline", "variance of the gradient", "mean lambda", "gradient variance, m = 4")
    for axis, title, xlabel in zip(axes, titles, ("rollouts",) * 3 + ("fixed lambda",), strict=True):
        axis.set(title=title, xlabel=xlabel)
        if axis is not axes[3]:
            axis.set(xticks=ROLLOUTS)
    axes[0].legend(fontsize="small")
    axes[2].legend(title="heterogeneity", fontsize="small")


def make() -> Page:
    bandit = make_bandit(SPREADS["medium"])
    baselines = {label: by_name(*each) for label, each in BASELINES.items()}
    results = {m: simulate(bandit, m, baselines) for m in ROLLOUTS}

    lambdas = {
        label: [simulate(make_bandit(each), m, {}).shrinkage for m in ROLLOUTS] for label, each in SPREADS.items()
    }
    lambda_rows = [
        [f"{label}, std of mu {float(make_bandit(each).values.std(correction=0)):.2f}", *row]
        for (label, each), row in zip(SPREADS.items(), lambdas.values(), strict=True)
    ]
    oracle_rows = [
        [f"{label}, Theorem 1", *(oracle(make_bandit(each), m) for m in ROLLOUTS)] for label, each in SPREADS.items()
    ]

    grid = [step / 10 for step in range(11)]
    sweeps = {}
    for label, spread in SPREADS.items():
        distances = simulate(make_bandit(spread), 4, {f"{value:g}": fixed(value) for value in grid}).response
        sweeps[label] = [distances[f"{value:g}"] / distances["0"] for value in grid]
    sweep_rows = [[label, *row, f"{grid[row.index(min(row))]:g}", lambdas[label][1]] for label, row in sweeps.items()]

    header = ("", *(f"m = {m}" for m in ROLLOUTS))
    return Page(
        "Shrinkage baseline, in simulation",
        [
            f"A softmax policy over {ANSWERS} answers per prompt with {FEATURES} shared parameters, and a wording of "
            f"{WORDING} normal draws that the reward does not depend on; the exact gradient is known. {PROMPTS} "
            f"prompts, {BATCHES} batches of m rollouts each, reward 1 for the right answer. The paper measures on "
            "checkpoints of language models. Here the prompts are fixed, so that differences are due to the baselines "
            "alone.",
            "## Figure 9: mean squared error of the baseline against the true value",
            markdown_table(header, _rows(results, lambda result: result.mse, "mse", relative=False)),
            "## Figure 10: squared distance to the true policy gradient, relative to RLOO",
            markdown_table(header, _rows(results, lambda result: result.response, "gradient", relative=True)),
            "Shrinkage is below RLOO everywhere, and less so with more rollouts, as in the paper. How much is gained "
            "depends on how alike the prompts are (medium heterogeneity here), so only the direction and the decline "
            "can be compared with its numbers. REINFORCE++ is without its scaling; its baseline contains the own "
            "reward. With 2 rollouts the batch mean alone does better than shrinkage, whose estimated lambda stays "
            "below 1/2 (see below).",
            "**Where the claim stops.** The theory takes the squared norm of a response's score to be independent of "
            "its reward (section 3.1). The same runs, of the parameters that choose the answer alone:",
            markdown_table(header, _rows(results, lambda result: result.answer, "gradient", relative=True)),
            "Here a batch mean beats every estimate of the value function, however exact: a right answer that was "
            "unlikely has a large score and a likely one a small score, so the variance-minimising baseline is far "
            "from mu (for two answers it is 1 - mu). Shrinkage still improves on RLOO. In long responses, most of "
            "whose tokens do not decide the reward, the first table is the one that matters.",
            "## Figures 7 and 11: lambda over rollouts and heterogeneity",
            markdown_table(header, lambda_rows + oracle_rows),
            "Lambda falls with m and with heterogeneity. The estimate of Eq. 15 is smaller than Theorem 1's optimum, "
            "for two reasons: it takes sigma^2 / m for the variance of a mean over the m - 1 other rollouts, and its "
            "s contains the sampling noise of the means. On prompts of equal difficulty it therefore tends to 1/2, "
            "not to 1.",
            "## Figure 12: variance of the gradient over a fixed lambda, m = 4, relative to RLOO (0)",
            markdown_table(("heterogeneity", *(f"{value:g}" for value in grid), "best", "estimated"), sweep_rows),
            "At every level of heterogeneity an interior lambda is best, and the estimate lies between it and 0. The "
            "paper varies the semantics of the prompts at equal difficulty instead; with scores that are independent "
            "between prompts, as here, that would change nothing.",
        ],
        partial(_draw, results, lambdas, grid, sweeps),
        (16, 3.8),
    )
