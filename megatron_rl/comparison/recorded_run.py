"""The comparison on a run's folder, as `megatron-rl compare` prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from rich.console import Console

from megatron_rl.algorithms import list_advantage_estimators, list_surrogates
from megatron_rl.base.messages import ConfigError, errors_named, leaves, unknown_name
from megatron_rl.comparison.summaries import (
    AdvantageSummary,
    Parameters,
    compare_estimators,
    compare_weights,
    summarize_advantages,
)
from megatron_rl.comparison.tables_and_plot import draw, estimator_table, weight_table
from megatron_rl.methods import ESTIMATOR, SURROGATE, check_method, load_plugins
from megatron_rl.report.status import read_recipe
from megatron_rl.trainer.record import RecordedStep, read_step, recorded_steps

RUN = "run"  # the label of what the run itself did


def compare(
    run_dir: Path,
    *,
    step: int | None = None,
    estimator: str = RUN,
    ratio: str = "token",
    plugins: Sequence[str] | None = None,
    params: Sequence[str] = (),
    plot: Path | None = None,
) -> None:
    """Prints both tables of a recorded step, and draws the plot.

    Args:
        step: which; None: the last.
        estimator: whose advantages the surrogates see.
        plugins: in place of those of the run's recipe.
        params: `METHOD.KEY=VALUE`.

    Raises:
        ConfigError: there is no such step, method, parameter or file; or the estimator cannot run on this step.
    """
    named = _plugins(run_dir) if plugins is None else plugins
    try:
        load_plugins(named)
    except ValueError as error:
        remedy = "" if plugins is not None else "; go to the folder that the run was started in, or name it: --plugins"
        raise ConfigError(f"{error}{remedy}") from None
    method_params = parameters(params)
    with errors_named("", as_error=ConfigError):
        number, recorded = choose_step(run_dir, step)
        advantages, left_out = estimators_of(recorded, method_params)
    if estimator not in advantages:
        raise ConfigError(f"--estimator {estimator}: {left_out.get(estimator) or _unknown(estimator, advantages)}")
    per_rollout = advantages[estimator].advantages.flatten()[recorded.rows]
    log_ratio = recorded.log_probs - recorded.old_log_probs
    by_token = recorded.token_advantages if estimator == RUN else None
    weights, shares = compare_weights(
        log_ratio,
        per_rollout[recorded.sequence_ids] if by_token is None else by_token,
        recorded.sequence_ids,
        list_surrogates(),
        ratio=ratio,
        params=method_params,
    )
    console = Console(soft_wrap=True, markup=False)
    console.width = max(console.width, 125)  # a narrower table would cut names
    n, m, _ = recorded.table.values.shape
    console.print(f"step {number}: {n} prompts x {m} rollouts, rewards {', '.join(recorded.table.names)}")
    console.print(estimator_table(advantages))
    for name, why in left_out.items():
        console.print(f"left out: {why}" if why.startswith(name) else f"left out: {name}: {why}")
    console.print(weight_table(weights, shares, ratio, estimator))
    if not bool((log_ratio != 0).any()):
        console.print("Every ratio is 1: the run made one update per batch, and all weights are 1.")
    path = plot or run_dir / f"compare_step_{number}.png"
    # ValueError: a kind of file that matplotlib does not know.
    with errors_named(f"cannot write {path}", OSError, ValueError, as_error=ConfigError):
        draw(path, advantages, weights, recorded, per_rollout, number, method_params)
    console.print(f"plot: {path}")


def _plugins(run_dir: Path) -> Sequence[str]:
    """The plug-ins of the run's recipe."""
    path = run_dir / "recipe.yaml"
    named = dict(leaves(read_recipe(path))).get("algorithm.plugins") if path.is_file() else ()
    return named if isinstance(named, list) else ()


def _unknown(name: str, known: Mapping[str, object]) -> str:
    return f"{unknown_name('estimator', name, known)}; one of your own is known with --plugins FILE"


def parameters(texts: Sequence[str]) -> dict[str, dict[str, object]]:
    """`METHOD.KEY=VALUE` of estimators and surrogates, checked; by the method's name.

    Raises:
        ConfigError: it is none, or the method or parameter is unknown or its value not allowed; with the nearest name.
    """
    by_method: dict[str, dict[str, object]] = {}
    for text in texts:
        place, is_value, value = text.partition("=")
        name, _, key = place.rpartition(".")
        if not (name and key and is_value):
            raise ConfigError(f"--params {text}: write METHOD.KEY=VALUE, for instance clip.eps_high=0.28")
        kind = next((kind for kind in (ESTIMATOR, SURROGATE) if name in _names()[kind]), None)
        if kind is None:
            raise ConfigError(
                f"--params {text}: {unknown_name('method', name, [*_names()[ESTIMATOR], *_names()[SURROGATE]])}"
            )
        with errors_named(f"--params {text}", ValueError, yaml.YAMLError, as_error=ConfigError):
            by_method.setdefault(name, {})[key] = yaml.safe_load(value)
            check_method(kind, name, by_method[name])
    return by_method


def _names() -> dict[str, tuple[str, ...]]:
    return {ESTIMATOR: list_advantage_estimators(), SURROGATE: list_surrogates()}


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


def estimators_of(step: RecordedStep, params: Parameters) -> tuple[dict[str, AdvantageSummary], dict[str, str]]:
    """The run's own advantages and every estimator's, by label; and why some are left out."""
    own = {RUN: summarize_advantages(step.table, step.advantages)}
    others, left_out = compare_estimators(step.table, list_advantage_estimators(), params)
    return own | others, left_out
