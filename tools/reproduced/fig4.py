"""DGPO's Figure 4: probability, ratio and relative gradient weight of the tokens of a recorded step, by method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.algorithms import REGIONS, make_surrogate, regions
from megatron_rl.report.status import read_recipe
from megatron_rl.trainer.record import read_step, recorded_steps
from reproduced.page import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPS = 0.2  # both bounds, in all of the paper's runs


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a step, at its last update on each; float32 [tokens] each.

    Attributes:
        probability: of the policy before the step's first update.
        ratio: of the policy before the last update to that.
        advantage: of the token's rollout.
        weight: F / ratio, the weight of the probability's gradient in units of 1 / probability: Figure 4's relative weight.
        region: index into `REGIONS`.
    """

    probability: Tensor
    ratio: Tensor
    advantage: Tensor
    weight: Tensor
    region: Tensor


def tokens_of(run_dir: Path) -> Tokens:
    """Of the first step that a run has recorded: runs that begin with the same weights have the same rollouts in it."""
    [path, *_] = recorded_steps(run_dir).values()
    step, surrogate = read_step(path), read_recipe(run_dir / "recipe.yaml")["algorithm"]["surrogate"]
    advantage = step.advantages.flatten()[step.rows][step.sequence_ids].float()
    log_ratio = step.log_probs - step.old_log_probs
    weight = make_surrogate(surrogate["name"], **surrogate["params"])(log_ratio, advantage)
    region = regions(log_ratio, advantage, EPS, EPS)
    return Tokens(step.old_log_probs.exp(), log_ratio.exp(), advantage, weight / log_ratio.exp(), region)


def weights_table(runs: Mapping[str, Path]) -> str:
    """Of each method: shares beyond the bounds, quantiles of the ratio, and the median probability by region."""
    rows = []
    for label, run_dir in runs.items():
        tokens, low, high = tokens_of(run_dir), REGIONS.index("LN"), REGIONS.index("HP")
        ends = tokens.ratio.quantile(torch.tensor([0.01, 0.99])).tolist()
        shares = [float((tokens.region == one).float().mean()) for one in (low, high)]
        medians = [_median(tokens.probability[tokens.region == one]) for one in (REGIONS.index("M"), low, high)]
        beyond = tokens.weight[tokens.region == low]
        largest = float(beyond.max()) if len(beyond) else "-"
        rows.append([label, *(f"{share:.1%}" for share in shares), *ends, *medians, largest])
    header = (
        "",
        "LN",
        "HP",
        "1 % of ratios below",
        "1 % above",
        "median probability in M",
        "in LN",
        "in HP",
        "largest weight in LN",
    )
    return markdown_table(header, rows)


def _median(values: Tensor) -> float | str:
    return float(values.median()) if len(values) else "-"


def draw_weights(figure: Figure, runs: Mapping[str, Path]) -> None:
    """A column per method: ratio by probability, weight by ratio, weight by probability; coloured by the advantage."""
    panels = figure.subplots(3, len(runs), sharex="row", sharey="row", squeeze=False)
    for column, (label, run_dir) in zip(panels.T, runs.items(), strict=True):
        tokens = tokens_of(run_dir)
        pairs = ((tokens.probability, tokens.ratio), (tokens.ratio, tokens.weight), (tokens.probability, tokens.weight))
        for axes, (across, up) in zip(column, pairs, strict=True):
            axes.scatter(across, up, s=2, c=tokens.advantage, cmap="coolwarm", vmin=-2, vmax=2, rasterized=True)
        column[0].set(title=label, xscale="log", yscale="log", xlabel="probability before the updates")
        column[1].set(xscale="log", yscale="symlog", xlabel="ratio")
        column[2].set(xscale="log", yscale="symlog", xlabel="probability before the updates")
    for axes, name in zip(panels[:, 0], ("ratio", "relative weight", "relative weight"), strict=True):
        axes.set_ylabel(name)
