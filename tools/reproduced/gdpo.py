"""GDPO, Fig. 2 and 3: how many different advantages a method can tell apart."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from megatron_rl.algorithms import AdvantageEstimator, RewardTable, distinct_advantage_groups, make_advantage_estimator
from reproduced.page import Page, markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLLOUTS = range(2, 12)
REWARDS = range(2, 6)
# Read off the authors' plot.
PAPER = {"rollouts": [3, 6, 14, 26, 38, 59, 81, 109, 145, 186], "rewards": [14, 45, 127, 318]}


def methods() -> dict[str, AdvantageEstimator]:
    """Fig. 3's three curves, without batch statistics, as in the paper."""
    return {
        "GRPO": make_advantage_estimator("grpo", eps=0.0),
        "GRPO without std": make_advantage_estimator("dr_grpo"),
        "GDPO": make_advantage_estimator("gdpo", batch_norm=False),
    }


def figure_2() -> list[list[object]]:
    """Two rollouts, two binary rewards: every pair of summed rewards and its advantages."""
    kinds = list(itertools.product((0.0, 1.0), repeat=2))
    rows: dict[tuple[object, ...], list[object]] = {}
    for first, second in itertools.product(kinds, kinds):
        table = RewardTable(torch.tensor([[first, second]], dtype=torch.float64), ("a", "b"))
        sums = tuple(sorted((int(sum(first)), int(sum(second)))))
        advantages = [sorted(method(table).advantages[0].tolist()) for method in methods().values()]
        shown = tuple("({:.4f}, {:.4f})".format(*(value + 0.0 for value in pair)) for pair in advantages)
        rows[(sums, shown)] = [f"({sums[0]}, {sums[1]})", *shown]
    return [rows[key] for key in sorted(rows, key=str)]


def make() -> Page:
    by_rollouts = {name: [distinct_advantage_groups(g, 2, each) for g in ROLLOUTS] for name, each in methods().items()}
    by_rewards = {name: [distinct_advantage_groups(4, k, each) for k in REWARDS] for name, each in methods().items()}
    agree = by_rollouts["GDPO"] == PAPER["rollouts"] and by_rewards["GDPO"] == PAPER["rewards"]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for name in by_rollouts:
            left.plot(list(ROLLOUTS), by_rollouts[name], marker="o", label=name)
            right.plot(list(REWARDS), by_rewards[name], marker="o", label=name)
        left.plot(list(ROLLOUTS), PAPER["rollouts"], "kx", label="GDPO in the paper")
        right.plot(list(REWARDS), PAPER["rewards"], "kx")
        left.set(xlabel="rollouts, two rewards", ylabel="distinct advantage groups")
        right.set(xlabel="rewards, four rollouts")
        left.legend()

    return Page(
        "GDPO: advantage resolution",
        [
            "## Figure 2: two rollouts, two binary rewards",
            "Summed rewards of the two rollouts, order ignored, and their advantages (sample standard deviation, no "
            "batch normalisation). GRPO has two distinct groups of advantages, GDPO three.",
            markdown_table(("summed rewards", *methods()), figure_2()),
            "## Figure 3: distinct groups of advantages",
            f"The counts {'are' if agree else 'ARE NOT'} those read off the paper's plot for GDPO.",
            markdown_table(
                ("two rewards, rollouts:", *map(str, ROLLOUTS)), ([name, *row] for name, row in by_rollouts.items())
            ),
            markdown_table(
                ("four rollouts, rewards:", *map(str, REWARDS)), ([name, *row] for name, row in by_rewards.items())
            ),
            "What the paper says in section 3.1 of three rollouts with rewards (1, 1, 0) and (0, 0, 1), that GDPO's "
            "advantages are not all 0 where GRPO's are, does not hold: the two normalised rewards are exact negatives "
            "of each other, and both methods give 0.",
        ],
        draw,
        (10, 4),
    )
