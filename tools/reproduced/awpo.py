"""AWPO, Lemma 3.1 and the gate: what mixing in a judge's reward does to advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.algorithms import RewardTable, make_advantage_estimator
from reproduced.page import Page, markdown_table
from reproduced.theory import awpo_decomposition, awpo_kappa_min

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS, ROLLOUTS = 4000, 8
SCORES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # what the judge may say (v1, Fig. 2)
EPS_MIX = (0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9)
JUDGES = {"agrees": 0.8, "knows nothing": 0.0, "contradicts": -0.8}


def sample(agreement: float, seed: int) -> tuple[Tensor, Tensor]:
    """Outcomes in [0, 2] and judge's scores; the judge follows the outcome's rank with this much agreement."""
    generator = torch.Generator().manual_seed(seed)
    difficulty = torch.rand(GROUPS, 1, generator=generator, dtype=torch.float64)
    success = (torch.rand(GROUPS, ROLLOUTS, generator=generator, dtype=torch.float64) < difficulty).double()
    partial = torch.rand(GROUPS, ROLLOUTS, generator=generator, dtype=torch.float64)
    outcome = success + torch.where(success > 0, 0.5 + partial / 2, partial / 2).mul(4).round() / 4
    noise = torch.rand(GROUPS, ROLLOUTS, generator=generator, dtype=torch.float64)
    target = outcome / 2 if agreement > 0 else 1 - outcome / 2
    wish = abs(agreement) * target + (1 - abs(agreement)) * noise
    scores = torch.tensor(SCORES, dtype=torch.float64)
    return outcome, scores[(wish[:, :, None] - scores).abs().argmin(2)]


def gate(outcome: Tensor, judge: Tensor, eps_mix: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of every group: whether the gate is open, sigma_out / sigma_mix, and the correlation of outcome and mixed reward."""
    table = RewardTable(torch.stack([outcome, judge], 2), ("outcome", "judge"))
    group = make_advantage_estimator("awpo", eps_mix=eps_mix, r_out_max=2.0)(table).group
    kappa = group["sigma_out"] / group["sigma_mix"].clamp(min=1e-300)
    standard = make_advantage_estimator("grpo", ddof=0, eps=0.0)
    a_out = standard(RewardTable(outcome[:, :, None], ("r",))).advantages
    a_mix = standard(RewardTable((outcome + judge)[:, :, None], ("r",))).advantages
    return group["w_mix"] > 0, kappa, (a_out * a_mix).mean(1)


def lemma(eps: float) -> tuple[float, float]:
    """Largest error of the decomposition, and the largest residual, over groups whose rewards vary."""
    outcome, judge = sample(0.0, 1)
    varies = (outcome.std(1) > 0) & ((outcome + judge).std(1) > 0)
    mixed, anchor, perturbation, residual = awpo_decomposition(outcome[varies], judge[varies], eps)
    error = (anchor + perturbation + residual - mixed).abs().max()
    return float(error), float(residual.abs().max())


def make() -> Page:
    rows = []
    for label, agreement in JUDGES.items():
        outcome, judge = sample(agreement, 2)
        for eps_mix in EPS_MIX:
            is_open, kappa, correlation = gate(outcome, judge, eps_mix)
            bound = awpo_kappa_min(eps_mix)
            inside = correlation[is_open]
            shown: list[object] = [label, f"{eps_mix:g}", f"{float(is_open.double().mean()):.1%}", bound]
            if len(inside):
                shown += [
                    float(kappa[is_open].min()),
                    float(inside.mean()),
                    f"{float((inside >= bound - 1e-9).double().mean()):.1%}",  # correlations of 1, up to rounding
                ]
            else:
                shown += ["-", "-", "-"]
            rows.append(shown)
    lemma_rows = []
    for eps in (1e-6, 1e-3, 1e-1):
        error, residual = lemma(eps)
        lemma_rows.append([f"{eps:g}", "< 1e-12" if error < 1e-12 else f"{error:.1e}", f"{residual:.1e}"])

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(JUDGES), sharey=True)
        for axis, (label, agreement) in zip(axes, JUDGES.items(), strict=True):
            is_open, kappa, correlation = gate(*sample(agreement, 2), 0.7)
            for where, colour, name in ((~is_open, "C1", "shut"), (is_open, "C0", "open")):
                axis.plot(kappa[where].clamp(max=3), correlation[where], ".", color=colour, markersize=2, label=name)
            axis.axvline(awpo_kappa_min(0.7), color="black", linewidth=0.8)
            axis.set(xlabel="sigma_out / sigma_mix", title=f"the judge {label}")
        axes[0].set(ylabel="correlation of A_out and A_mix")
        axes[0].legend()

    return Page(
        "AWPO: Lemma 3.1 and the gate",
        [
            "## Lemma 3.1",
            "$A_\\text{mix} = (\\sigma_\\text{out} / \\sigma_\\text{mix}) A_\\text{out} + \\tilde R_\\text{reasoning} "
            "/ (\\sigma_\\text{mix} + \\epsilon) + \\Delta$ on random groups: largest error of the sum, and largest "
            "residual $\\Delta$, which vanishes with $\\epsilon$ as the paper says.",
            markdown_table(("eps", "error", "residual"), lemma_rows),
            "## The gate (Eq. 21, Theorem 3.5)",
            f"{GROUPS} groups of {ROLLOUTS} rollouts; outcomes in [0, 2], judge's scores from {{0, .25, .5, .75, .9, "
            "1} that agree with the outcome, are independent of it, or contradict it. Saturation off. Of the groups "
            "that the gate lets through: smallest $\\sigma_\\text{out} / \\sigma_\\text{mix}$, mean correlation of "
            "both advantages, and the share whose correlation reaches $\\kappa_\\text{min}$.",
            markdown_table(
                ("judge", "eps_mix", "open", "kappa_min", "smallest ratio", "correlation", "reaches kappa_min"), rows
            ),
            "The bound on the ratio of the standard deviations always holds: it is the gate, rewritten. The bound on "
            "the correlation is a statement about the average, and about judges who are not systematically at odds "
            "with the outcome. For the independent judge it holds on average, and in 93 to 97 % of the groups, from "
            "$\\varepsilon_\\text{mix} = 0.55$ on. Below 0.5 it cannot hold: $\\kappa_\\text{min}$ is then greater "
            "than 1, and no correlation is.",
            "What the gate measures is spread, not agreement, and that has a consequence which the paper does not "
            "draw. A judge who contradicts the outcome narrows the mixed reward, so $\\rho$ is small and the gate "
            "opens; one who agrees widens it, so $\\rho \\geq 1/2$. At $\\varepsilon_\\text{mix} = 0.55$ it lets "
            "through 99 % of the groups of the judge who contradicts, and 3 % of those of the one who agrees. From "
            "0.7 on it is open for nearly everyone.",
        ],
        draw,
        (12, 4),
    )
