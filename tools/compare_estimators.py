"""What every estimator and gradient weight would have done with rollouts that a run recorded.

    python tools/compare_estimators.py RUN_DIR [--step N] [--estimator NAME] [--ratio LEVEL] [--plot FILE]

The run records its rollouts every `logging.record_every` steps. Methods run at their default parameters; the line `run` is
what the run itself used. Prints two tables and draws a plot, `<run_dir>/compare_step_<n>.png`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_rl.algorithms import (
    REGIONS,
    Groups,
    RewardTable,
    count_advantage_groups,
    list_advantage_estimators,
    list_gradient_weights,
    make_advantage_estimator,
    make_gradient_weight,
    regions,
)
from megatron_rl.algorithms.correction import sequence_log_ratio
from megatron_rl.config.algorithm import Ratio
from megatron_rl.trainer.record import RecordedStep, read_step, recorded_steps

RUN = "run"  # the label of what the run itself did


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    try:
        number, step = choose_step(args.run_dir, args.step)
        advantages, left_out = estimators_of(step)
        if args.estimator not in advantages:
            raise ValueError(
                f"--estimator {args.estimator}: {left_out.get(args.estimator, 'choose from ' + ', '.join(advantages))}"
            )
    except ValueError as error:
        print(f"compare_estimators: {error}", file=sys.stderr)
        return 2
    per_rollout = advantages[args.estimator].advantages.flatten()[step.rows]
    log_ratio = step.log_probs - step.old_log_probs
    weights, shares = compare_weights(
        log_ratio,
        per_rollout[step.sequence_ids],
        step.sequence_ids,
        list_gradient_weights(),
        ratio=args.ratio,
    )
    console = Console(soft_wrap=True)
    console.width = max(console.width, 125)  # a narrower table would cut names
    n, m, _ = step.table.values.shape
    console.print(f"step {number}: {n} prompts x {m} rollouts, rewards {', '.join(step.table.names)}")
    console.print(estimator_table(advantages))
    for name, why in left_out.items():
        console.print(f"left out: {why}" if why.startswith(name) else f"left out: {name}: {why}")
    console.print(weight_table(weights, shares, args))
    if not bool((log_ratio != 0).any()):
        console.print("Every ratio is 1: the run made one update per batch, and all weights are 1.")
    plot = args.plot or args.run_dir / f"compare_step_{number}.png"
    draw(plot, advantages, weights, step, per_rollout, number)
    console.print(f"plot: {plot}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="folder of a run")
    parser.add_argument("--step", type=int, help="which recorded step (default: the last)")
    parser.add_argument(
        "--estimator", default=RUN, help="whose advantages the gradient weights see (default: the run's)"
    )
    parser.add_argument("--ratio", default="token", choices=get_args(Ratio), help="level of the ratio (default: token)")
    parser.add_argument("--plot", type=Path, help="where the plot goes (default: into the run folder)")
    return parser.parse_args(arguments)


def choose_step(run_dir: Path, number: int | None) -> tuple[int, RecordedStep]:
    """The recorded step of that number, or the last one. ValueError, naming what there is, where it does not exist."""
    steps = recorded_steps(run_dir)
    if not steps:
        raise ValueError(
            f"{run_dir} has no recorded steps (rollouts/step_<n>.npz); set logging.record_every in the recipe"
        )
    number = max(steps) if number is None else number
    if number not in steps:
        raise ValueError(f"step {number} was not recorded; there are {', '.join(map(str, steps))}")
    return number, read_step(steps[number])


@dataclass
class AdvantageSummary:
    """Of one estimator's advantages of one step.

    Attributes:
        advantages: float64 [n, m].
        spread: standard deviation over all rollouts.
        largest: largest |A|.
        silent: share of groups whose advantages are all 0.
        groups: different groups of advantages (GDPO Fig. 3).
        noise: mean(A^2 tokens) / signal^2, where signal is the mean over groups of the covariance of A and the summed reward.
            A proxy of the gradient's relative variance that does not depend on the advantages' scale: it takes the
            squared norm of a rollout's score to be proportional to its length. None where there is no signal.
        metrics: the estimator's own.
    """

    advantages: Tensor
    spread: float
    largest: float
    silent: float
    groups: int
    noise: float | None
    metrics: dict[str, float] = field(default_factory=dict)


def summarize_advantages(
    table: RewardTable, advantages: Tensor, metrics: Mapping[str, float] | None = None
) -> AdvantageSummary:
    """See `AdvantageSummary`; `advantages` is [n, m]."""
    groups, valid = Groups(table), table.mask
    advantages = advantages.double()
    seen = advantages[valid]
    scale = groups.count / (groups.count - 1).clamp(min=1)
    own = torch.where(valid, advantages, 0.0)
    covariance = (own * groups.centred.values).sum(1) / groups.count.clamp(min=1) * scale
    signal = float(covariance[groups.present].mean())
    tokens = table.lengths.double() if table.lengths is not None else torch.ones_like(advantages)
    squares = float((own.square() * tokens)[valid].mean())
    silent = ((advantages == 0) | ~valid).all(1)[groups.present]
    return AdvantageSummary(
        advantages=own,
        spread=float(seen.std(correction=0)),
        largest=float(seen.abs().max()),
        silent=float(silent.double().mean()),
        groups=count_advantage_groups(advantages, valid),
        noise=squares / signal**2 if signal else None,
        metrics=dict(metrics or {}),
    )


def compare_estimators(table: RewardTable, names: Sequence[str]) -> tuple[dict[str, AdvantageSummary], dict[str, str]]:
    """Estimators at their default parameters on one reward table.

    Returns:
        Summaries by name; and for each estimator that cannot run on this table, why.
    """
    summaries, left_out = {}, {}
    for name in names:
        estimator = make_advantage_estimator(name)
        if missing := estimator.unmet(table):
            left_out[name] = "; ".join(missing)
            continue
        estimate = estimator(table)
        summaries[name] = summarize_advantages(table, estimate.advantages, estimate.metrics)
    return summaries, left_out


@dataclass
class WeightSummary:
    """Of one gradient weight on one step's tokens.

    Attributes:
        weights: F, float64 [tokens].
        mean, largest: of F over tokens with A != 0.
        stopped: share of tokens with A != 0 that get no gradient.
        region_weight: mean F in each region of DGPO's Table 1 that has tokens.
        push: mean |F A| / mean |w A|: the gradient's size against plain importance weighting.
        effective: (sum |F A|)^2 / (N sum (F A)^2), N tokens with A != 0: the share that would do with equal weights.
    """

    weights: Tensor
    mean: float
    largest: float
    stopped: float
    region_weight: dict[str, float]
    push: float
    effective: float


def compare_weights(
    log_ratio: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    names: Sequence[str],
    *,
    ratio: str = "token",
    bounds: tuple[float, float] = (0.2, 0.2),
) -> tuple[dict[str, WeightSummary], dict[str, float]]:
    """Gradient weights at their default parameters on one step's tokens.

    Args:
        log_ratio: log of pi / pi_old, [tokens] over whole rollouts.
        advantages: each rollout's, repeated on its tokens.
        sequence_ids: int64 [tokens], which rollout each token belongs to.
        names: the gradient weights.
        ratio: level of the ratio, as `algorithm.ratio`.
        bounds: (eps_low, eps_high) that regions are counted at.

    Returns:
        Summaries by name; and the share of tokens in each region.
    """
    log_ratio, advantages = log_ratio.double(), advantages.double()
    if ratio != "token":
        everything = torch.ones_like(log_ratio, dtype=torch.bool)
        log_ratio = sequence_log_ratio(log_ratio, everything, sequence_ids, mean=ratio == "sequence")
    region = regions(log_ratio, advantages, *bounds)
    live = advantages != 0
    plain = make_gradient_weight("none")(log_ratio, advantages)
    summaries = {}
    for name in names:
        weight = make_gradient_weight(name)(log_ratio, advantages)
        summaries[name] = _summarize_weight(weight, plain, advantages, region, live)
    shares = {name: _mean((region == index).double()) for index, name in enumerate(REGIONS)}
    return summaries, shares


def _summarize_weight(weight: Tensor, plain: Tensor, advantages: Tensor, region: Tensor, live: Tensor) -> WeightSummary:
    seen, push = weight[live], (weight * advantages)[live].abs()
    squares = float(push.square().sum())
    inside = {name: weight[live & (region == index)] for index, name in enumerate(REGIONS)}
    return WeightSummary(
        weights=weight,
        mean=_mean(seen),
        largest=float(seen.max()) if len(seen) else 0.0,
        stopped=_mean((seen == 0).double()),
        region_weight={name: _mean(values) for name, values in inside.items() if len(values)},
        push=float(push.sum()) / max(float((plain * advantages)[live].abs().sum()), 1e-300),
        effective=float(push.sum()) ** 2 / (len(push) * squares) if squares else 0.0,
    )


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


def estimators_of(step: RecordedStep) -> tuple[dict[str, AdvantageSummary], dict[str, str]]:
    """The run's own advantages and every estimator's, by label; and why some are left out."""
    own = {RUN: summarize_advantages(step.table, step.advantages)}
    others, left_out = compare_estimators(step.table, list_advantage_estimators())
    return own | others, left_out


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


def weight_table(
    summaries: Mapping[str, WeightSummary], shares: Mapping[str, float], args: argparse.Namespace
) -> Table:
    title = f"Gradient weights, {args.ratio} ratio, advantages of {args.estimator}"
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
    per_rollout: torch.Tensor,
    number: int,
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
    _draw_curves(axes[1, 0], list(weights))
    _draw_ratios(axes[1, 1], step, per_rollout)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_curves(axis: Any, names: Sequence[str]) -> None:
    log_ratio = torch.linspace(-1.5, 1.5, 301, dtype=torch.float64)
    for index, name in enumerate(names):
        weight = make_gradient_weight(name)
        for sign, style in ((1.0, "-"), (-1.0, ":")):
            values = weight(log_ratio, torch.full_like(log_ratio, sign))
            label = name if sign > 0 else None
            axis.plot(log_ratio.exp(), values, style, color=f"C{index}", label=label, linewidth=1.2)
    axis.set(xlabel="ratio w", ylabel="F", ylim=(0, 3.2), title="gradient weights (solid A > 0, dotted A < 0)")
    axis.legend(fontsize="small")


def _draw_ratios(axis: Any, step: RecordedStep, per_rollout: torch.Tensor) -> None:
    ratio = (step.log_probs - step.old_log_probs).double().exp().clamp(max=3.0)
    advantages = per_rollout[step.sequence_ids]
    for name, where in (("A > 0", advantages > 0), ("A < 0", advantages < 0)):
        axis.hist(ratio[where].numpy(), bins=60, histtype="step", log=True, label=name)
    axis.set(xlabel="ratio w (3 and above in the last bin)", ylabel="tokens", title="ratios")
    axis.legend(fontsize="small")


if __name__ == "__main__":
    sys.exit(main())
