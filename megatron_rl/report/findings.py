"""Warning signs in a run's metrics: each rule in a line or two, with the numbers behind it.

A rule compares the run with the "healthy" column of docs/metrics.md. It says where to look, not what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

from megatron_rl.report.run_record import RunRecord

_WINDOW = 10  # steps that "at the end" means


@dataclass(frozen=True)
class Finding:
    """`level`: `good`, `look` (worth a look) or `bad`; `text`: a sentence with the numbers."""

    level: str
    text: str


def find(run: RunRecord) -> list[Finding]:
    """All findings of a run, the worst first."""
    found = [finding for rule in _RULES for finding in rule(run)]
    return sorted(found, key=lambda finding: ("bad", "look", "good").index(finding.level))


def _end(values: Sequence[float]) -> float:
    return fmean(values[-_WINDOW:])


def evaluation(run: RunRecord) -> Iterator[Finding]:
    for metric in run.metrics():
        if not (metric.startswith("eval/") and "/avg@" in metric):
            continue
        steps, values = run.series(metric)
        errors = run.errors(metric)
        if len(values) < 2:
            continue
        name, top = metric.removeprefix("eval/"), values.index(max(values))
        best, rise = values[top], values[-1] - values[0]
        change = f"{values[0]:.3f} → {values[-1]:.3f} (step {steps[-1]})"
        noise = _noise(errors, steps[0], steps[-1])
        if best - values[-1] > max(0.05, _noise(errors, steps[top], steps[-1], len(values) - 1)):
            yield Finding("bad", f"{name} fell from its best, {best:.3f} at step {steps[top]}: {change}")
        elif rise > noise:
            yield Finding("good", f"{name} rose: {change}" + (f", by {rise:.3f} ± {noise:.3f}" if noise else ""))
        elif rise > 0:
            yield Finding("look", f"{name} rose by {rise:.3f}, within noise (± {noise:.3f}): {change}")
        else:
            yield Finding("look", f"{name} did not rise: {change}")


def _noise(errors: Mapping[int, float], first: int, second: int, chosen_of: int = 1) -> float:
    """Returns by how much two evaluations with these steps' standard errors differ by chance in one case of twenty, and
    where the first is the best of several, `chosen_of`. 0 where the errors are not known."""
    spread = math.hypot(errors.get(first, 0.0), errors.get(second, 0.0))
    return NormalDist().inv_cdf(1 - 0.025 / chosen_of) * spread


def signal(run: RunRecord) -> Iterator[Finding]:
    _, values = run.series("groups/signal_share")
    if values and _end(values) < 0.2:
        mean = run.series("reward/mean")[1]
        yield Finding(
            "look",
            f"only {_end(values):.0%} of the groups had a signal at the end (reward {_end(mean):.3f}): the prompts have "
            "become too easy, or are too hard; algorithm.resample_rounds replaces such groups",
        )
    for metric in run.metrics():
        if metric.startswith("reward_signal_share/") and metric.partition("/")[2] not in ("overlong", "kl"):
            _, shares = run.series(metric)
            if max(shares) == 0.0:
                yield Finding(
                    "look", f"the reward {metric.partition('/')[2]} never differed within a group: it has no say"
                )


def truncation(run: RunRecord) -> Iterator[Finding]:
    _, values = run.series("response_length/truncated_share")
    if values and _end(values) > 0.1:
        yield Finding(
            "look",
            f"{_end(values):.0%} of the rollouts were cut at the token limit at the end (first step {values[0]:.0%}): raise "
            "rollout.max_tokens, or see algorithm.truncated and algorithm.overlong",
        )


def entropy(run: RunRecord) -> Iterator[Finding]:
    _, values = run.series("actor/entropy")
    if len(values) < 4:
        return
    if values[-1] < 0.02 * values[0]:
        yield Finding("look", f"entropy fell from {values[0]:.3f} to {values[-1]:.1e}: hardly any exploration is left")
    if values[-1] > 3 * values[0] and values[-1] > values[0] + 0.5:
        yield Finding("bad", f"entropy rose from {values[0]:.3f} to {values[-1]:.3f}: the policy is coming apart")


def gradients(run: RunRecord) -> Iterator[Finding]:
    steps, values = run.series("actor/grad_norm_max")
    finite = [value for value in values if math.isfinite(value) and value > 0]
    if len(finite) >= 8 and max(finite) > 10 * median(finite):
        at = steps[values.index(max(finite))]
        yield Finding(
            "look", f"gradient norm {max(finite):.2g} at step {at}, {max(finite) / median(finite):.0f} × the median"
        )


def trust_region(run: RunRecord) -> Iterator[Finding]:
    low, high = run.series("region_share/LN")[1], run.series("region_share/HP")[1]
    if low and high and _end(low) + _end(high) > 0.2:
        yield Finding(
            "look",
            f"{_end(low) + _end(high):.0%} of the tokens were outside the trust region at the end: smaller steps, fewer "
            "minibatches or epochs",
        )


def agreement(run: RunRecord) -> Iterator[Finding]:
    _, values = run.series("mismatch/abs_log_ratio")
    if len(values) >= 8 and fmean(values[-4:]) > 5 * fmean(values[:4]) and values[-1] > 1e-3:
        yield Finding(
            "bad",
            f"trainer and engine drift apart: mean |log ratio| {fmean(values[:4]):.1e} → {fmean(values[-4:]):.1e}; see "
            "docs on train and rollout disagreeing",
        )


def losses(run: RunRecord) -> Iterator[Finding]:
    for name in run.metrics():
        if name.startswith("reward_timeouts/") and (total := sum(run.series(name)[1])):
            yield Finding("look", f"{total:.0f} reward calls ran into their deadline ({name.partition('/')[2]})")


_RULES: tuple[Callable[[RunRecord], Iterator[Finding]], ...] = (
    evaluation,
    signal,
    truncation,
    entropy,
    gradients,
    trust_region,
    agreement,
    losses,
)
