"""DGPO, Fig. 2 and Table 2: gradient weights, and their bias against the policy gradient."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.algorithms import make_surrogate
from reproduced.page import Page, markdown_table
from reproduced.theory import aspo_eq6, ln_bias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPS = 0.2
R0 = 1 - EPS
WEIGHTS: dict[str, tuple[str, dict[str, float]]] = {
    "GRPO": ("clip", {}),
    "CISPO": ("cispo", {}),
    "GPPO": ("gppo", {}),
    "CE-GPPO": ("ce_gppo", {}),
    "ASPO": ("aspo", {}),
    "DGPO": ("dgpo", {"n": 1, "m": 2}),
}
REGIONS = {
    "M": (R0, 1 + EPS, 1),
    "LN": (0.05, R0, -1),
    "HP": (1 + EPS, 3.0, 1),
    "LP": (0.05, R0, 1),
    "HN": (1 + EPS, 3.0, -1),
}
GAMMAS = [index / 2 for index in range(61)]


def weight(label: str, ratio: Tensor, sign: int) -> Tensor:
    name, params = WEIGHTS[label]
    return make_surrogate(name, **params)(ratio.log(), torch.full_like(ratio, float(sign)))


def mean_bias(label: str, region: str) -> float:
    """Mean of |F - w| over ratios spread evenly over the region, its bounds left out."""
    low, high, sign = REGIONS[region]
    ratio = low + (high - low) * (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    return float((weight(label, ratio, sign) - ratio).abs().mean())


def holds_from(order: list[tuple[str, int]]) -> dict[str, float | None]:
    """For each neighbouring pair of the left ordering: the smallest gamma of the grid from which on it always holds."""
    found: dict[str, float | None] = {}
    for (a, n_a), (b, n_b) in itertools.pairwise(order):
        good = [ln_bias(a, gamma, n_a, R0) < ln_bias(b, gamma, n_b, R0) for gamma in GAMMAS]
        first = len(good) - next((i for i, each in enumerate(reversed(good)) if not each), len(good))
        found[f"{a} < {b}"] = GAMMAS[first] if first < len(good) else None
    return found


def make() -> Page:
    left_rows = [
        [label, *(ln_bias(method, gamma, n, R0) / R0 ** (gamma + 2) for gamma in (0.0, 1.0, 2.0, 5.0, 10.0, 30.0))]
        for label, method, n in (
            ("DGPO, n = 1", "dgpo", 1),
            ("DGPO, n = 2", "dgpo", 2),
            ("CISPO, GPPO", "cispo", 1),
            ("CE-GPPO, exact", "ce", 1),
            ("CE-GPPO, Eq. 31 as printed", "ce_eq31", 1),
            ("GRPO, ASPO", "grpo", 1),
        )
    ]
    claims = {
        "n = 1": holds_from([("dgpo", 1), ("cispo", 1), ("ce", 1), ("grpo", 1)]),
        "n = 1, with Eq. 31": holds_from([("dgpo", 1), ("cispo", 1), ("ce_eq31", 1), ("grpo", 1)]),
        "n = 2": holds_from([("cispo", 1), ("dgpo", 2), ("ce", 1), ("grpo", 1)]),
    }
    claim_rows = [
        [case, pair, "never below 30" if gamma is None else f"{gamma:g}"]
        for case, pairs in claims.items()
        for pair, gamma in pairs.items()
    ]
    other_rows = [[label, *(mean_bias(label, region) for region in REGIONS)] for label in WEIGHTS]
    ratio = torch.tensor([0.5, 3.5], dtype=torch.float64)
    literal = torch.stack([aspo_eq6(ratio.log(), torch.full_like(ratio, float(sign))) for sign in (1, -1)])

    return Page(
        "DGPO: gradient weights and their bias",
        [
            "## Table 2, left boundary (LN)",
            "The bias of Eq. 29-32, $\\int_0^{r_0} |F(r) - r|\\, r^\\gamma dr$, in units of $k \\delta "
            "r_0^{\\gamma+2}$ with $r_0 = 0.8$, $\\beta_1 = 0.75$. Eq. 31 as printed has the absolute value around "
            "the integral, although the integrand changes sign at $\\beta_1 r_0$; the exact row is the integral of "
            "the absolute value.",
            markdown_table(("bias", *(f"$\\gamma$ = {gamma}" for gamma in (0, 1, 2, 5, 10, 30))), left_rows),
            "The paper's ordering is a statement about large $\\gamma$ (ratios that lie close to the bound), not "
            "about every distribution of ratios. Each inequality holds from this $\\gamma$ on (grid of 0.5):",
            markdown_table(("ordering", "inequality", "from gamma"), claim_rows),
            "Pointwise, at every ratio, only DGPO (n = 1) < CISPO = GPPO and DGPO < GRPO hold: as $w \\to 0$ the bias "
            "of GRPO vanishes and that of CISPO tends to 0.8.",
            "## The other regions",
            "Mean of $|F - w|$ over ratios spread evenly over [0.05, 0.8), [0.8, 1.2], (1.2, 3]. M is for $A > 0$. "
            "DGPO has m = 2; with m = 1 its right side is GPPO's. The paper's equality of CISPO and ASPO in LP and HN "
            "does not hold for ASPO as its authors run it ($1/w$ for $A > 0$ only, $w$ otherwise, capped at 3): it is "
            "unbiased in HN up to the cap.",
            markdown_table(("weight", *REGIONS), other_rows),
            "ASPO as Eq. 6 prints it, with the reversed ratio for both signs, gives F(0.5, A>0) = "
            f"{float(literal[0, 0]):.2f} and F(3.5, A<0) = {float(literal[1, 1]):.2f}, and jumps at its outer bounds: "
            "at w = 0.67 from 1.49 to 0.67, at w = 4 from 0.25 to 4.",
            "## Figure 2",
            "Left: $F$, the weight of $\\nabla \\log \\pi$. Right: $F / w$, the weight of $\\nabla \\pi$ relative to "
            "plain importance sampling, which is what the paper calls convergent or divergent. For $w \\to 0$ and $A "
            "< 0$ the weights of CISPO, GPPO and CE-GPPO diverge, DGPO's goes to 0.",
        ],
        _draw,
        (11, 8),
    )


def _draw(figure: Figure) -> None:
    axes = figure.subplots(2, 2)
    left, right = (
        torch.linspace(0.05, 1.2, 400, dtype=torch.float64),
        torch.linspace(0.8, 3.0, 400, dtype=torch.float64),
    )
    for row, (ratio, sign) in enumerate(((left, -1), (right, 1))):
        for label in WEIGHTS:
            values = weight(label, ratio, sign)
            axes[row, 0].plot(ratio, values, label=label)
            axes[row, 1].plot(ratio, values / ratio, label=label)
        axes[row, 0].set(xlabel="w", ylabel="F", title=f"A {'<' if sign < 0 else '>'} 0")
        axes[row, 1].set(xlabel="w", ylabel="F / w", title=f"A {'<' if sign < 0 else '>'} 0", ylim=(-0.1, 4))
    axes[0, 0].legend()
