"""The comparison of a step as two tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from megatron_rl.algorithms import REGIONS, make_surrogate
from megatron_rl.comparison.summaries import AdvantageSummary, Parameters, WeightSummary
from megatron_rl.trainer.record import RecordedStep


def estimator_table(summaries: Mapping[str, AdvantageSummary]) -> Table:
    table = Table(title="Advantage estimators", title_justify="left")
    for column in ("estimator", "std of A", "max |A|", "silent groups", "distinct groups", "noise / RLOO's", "notes"):
        table.add_column(column, justify="left" if column in ("estimator", "notes") else "right")
    reference = summaries["rloo"].noise
    for label, each in summaries.items():
        noise = f"{each.noise / reference:.3f}" if each.noise is not None and reference else "-"
        notes = ", ".join(f"{name.partition('/')[2]} {value:.3g}" for name, value in each.metrics.items())
        row = (label, f"{each.spread:.3f}", f"{each.largest:.3f}", f"{each.silent:.1%}", str(each.groups), noise, notes)
        table.add_row(*row)
    return table


def weight_table(summaries: Mapping[str, WeightSummary], shares: Mapping[str, float], ratio: str, whose: str) -> Table:
    title = f"Surrogates, {ratio} ratio, advantages of {whose}"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = "share of tokens: " + ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
    for column in ("weight", "mean F", "max F", "stopped", *(f"F in {name}" for name in REGIONS), "push", "effective"):
        table.add_column(column, justify="left" if column == "weight" else "right")
    for label, each in summaries.items():
        inside = [f"{each.region_weight[name]:.3f}" if name in each.region_weight else "-" for name in REGIONS]
        ends = (f"{each.push:.3f}", f"{each.effective:.1%}")
        table.add_row(label, f"{each.mean:.3f}", f"{each.largest:.3f}", f"{each.stopped:.2%}", *inside, *ends)
    return table


def draw(
    path: Path,
    advantages: Mapping[str, AdvantageSummary],
    weights: Mapping[str, WeightSummary],
    step: RecordedStep,
    per_rollout: Tensor,
    number: int,
    params: Parameters,
) -> None:
    """Four panels: spread of the advantages, noise, weights over ratios, and how far tokens went."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"step {number}")
    valid = step.table.mask
    labels = list(advantages)
    axes[0, 0].boxplot([advantages[label].advantages[valid].numpy() for label in labels], orientation="horizontal")
    axes[0, 0].set(yticklabels=labels, xlabel="advantage", title="advantages")
    reference = advantages["rloo"].noise
    noisy = {label: each.noise for label, each in advantages.items() if each.noise is not None}
    if reference:
        axes[0, 1].barh(list(noisy), [value / reference for value in noisy.values()])
        axes[0, 1].axvline(1.0, color="black", linewidth=0.8)
    axes[0, 1].set(xlabel="relative to RLOO", title="proxy of the gradient's relative variance")
    _draw_curves(axes[1, 0], list(weights), params)
    _draw_ratios(axes[1, 1], step, per_rollout)
    try:
        figure.savefig(path, dpi=110, format=path.suffix[1:] or "png")
    finally:
        pyplot.close(figure)


def _draw_curves(axis: Any, names: Sequence[str], params: Parameters) -> None:
    log_ratio = torch.linspace(-1.5, 1.5, 301, dtype=torch.float64)
    for index, name in enumerate(names):
        weight = make_surrogate(name, **params.get(name, {}))
        for sign, style in ((1.0, "-"), (-1.0, ":")):
            values = weight(log_ratio, torch.full_like(log_ratio, sign))
            label = name if sign > 0 else None
            axis.plot(log_ratio.exp(), values, style, color=f"C{index}", label=label, linewidth=1.2)
    axis.set(xlabel="ratio w", ylabel="F", ylim=(0, 3.2), title="surrogates (solid A > 0, dotted A < 0)")
    axis.legend(fontsize="small")


def _draw_ratios(axis: Any, step: RecordedStep, per_rollout: Tensor) -> None:
    ratio = (step.log_probs - step.old_log_probs).double().exp().clamp(max=3.0)
    advantages = per_rollout[step.sequence_ids]
    for name, where in (("A > 0", advantages > 0), ("A < 0", advantages < 0)):
        axis.hist(ratio[where].numpy(), bins=60, histtype="step", log=True, label=name)
    axis.set(xlabel="ratio w (3 and above in the last bin)", ylabel="tokens", title="ratios")
    axis.legend(fontsize="small")
