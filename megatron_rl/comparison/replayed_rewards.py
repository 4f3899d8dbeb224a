"""A recorded step's rewards computed again from its texts, as `megatron-rl replay` prints them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_rl.base.messages import ConfigError, errors_named
from megatron_rl.comparison.recorded_run import choose_step
from megatron_rl.config import load_recipe
from megatron_rl.config.schema import Config, RewardConfig
from megatron_rl.rewards import Scorer
from megatron_rl.rewards.registry import check_rewards, columns_of
from megatron_rl.rewards.remote import RemoteReward
from megatron_rl.rewards.score_checks import RewardError
from megatron_rl.runtime import disk
from megatron_rl.trainer.record import recorded_steps
from megatron_rl.trainer.record_texts import RecordedText, folder_of, read_texts

_SHOWN = 20  # rollouts that differ
_TAIL = 60  # characters of a text's end


@dataclass
class Replayed:
    """Rewards of one step, recorded and computed again.

    Attributes:
        texts: of all rollouts that have rewards, in the order of their rows.
        before, after: a column's number for each of them, float64 [texts]; NaN: no value. A column that was not recorded is
            in `after` alone, one that was not computed again in `before` alone.
        left: why rewards were not computed again.
        weights: by column.
    """

    texts: list[RecordedText]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    left: dict[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def differing(self, column: str) -> np.ndarray:
        """bool [texts]: where both numbers are there and are not the same."""
        before, after = self.before[column], self.after[column]
        return (before != after) & ~(np.isnan(before) & np.isnan(after))

    @property
    def compared(self) -> list[str]:
        return [column for column in self.after if column in self.before]


def replay(run_dir: Path, *, step: int | None = None, overrides: Sequence[str] = (), out: Path | None = None) -> bool:
    """Prints what the rewards make of a recorded step now, and which rollouts have other ones than they had.

    Args:
        step: which; None: the last that was recorded.
        overrides: of the recipe's `rewards`.
        out: gets a line of JSON per rollout.

    Returns:
        Whether nothing differs.

    Raises:
        ConfigError: no such step or texts, an override of something else, a reward that cannot be made or raises.
    """
    config = _recipe(run_dir, overrides)
    with errors_named("", as_error=ConfigError):
        number, recorded = choose_step(run_dir, step)
    path = recorded_steps(run_dir)[number]
    with errors_named("", as_error=ConfigError):
        texts = sorted(read_texts(path), key=lambda text: text.row)
    if not texts:
        raise ConfigError(
            f"step {number} has no texts ({folder_of(path)}): it was recorded before runs kept them; choose a later one"
        )
    table = recorded.table
    n, m, k = table.values.shape
    valid, numbers = table.mask.numpy().reshape(n * m), table.values.numpy().reshape(n * m, k).copy()
    if table.scored is not None:
        numbers[~table.scored.numpy().reshape(n * m, k)] = np.nan
    if [text.row for text in texts] != [*range(n * m)]:
        raise ConfigError(
            f"{folder_of(path)} has {len(texts)} of the step's {n * m} rollouts: an engine's file is missing"
        )
    texts = [text for text in texts if valid[text.row]]
    before = {name: numbers[valid, i] for i, name in enumerate(table.names)}
    replayed = _scored(config.rewards, texts, before)
    _show(replayed, number, Console(soft_wrap=True, markup=False))
    if out is not None:
        with errors_named(f"cannot write {out}", OSError, as_error=ConfigError), disk.text_file(out) as file:
            for i, text in enumerate(texts):
                file.write(json.dumps(_line(replayed, i, text), ensure_ascii=False) + "\n")
    return not any(replayed.differing(column).any() for column in replayed.compared)


def _recipe(run_dir: Path, overrides: Sequence[str]) -> Config:
    path = run_dir / "recipe.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run folder: it has no recipe.yaml")
    if other := [text for text in overrides if not text.startswith("rewards.")]:
        raise ConfigError(f"{other[0]}: a replay reads rewards alone; override rewards.<name>...")
    return load_recipe(path, overrides)


def _scored(
    rewards: Mapping[str, RewardConfig], texts: Sequence[RecordedText], before: Mapping[str, np.ndarray]
) -> Replayed:
    with errors_named("", as_error=ConfigError):
        kinds = check_rewards(rewards)
        left = dict(_left(rewards, before))
        scorer = Scorer({name: config for name, config in rewards.items() if name not in left}, list(before))
    with closing(scorer), errors_named("", RewardError, ValueError, as_error=ConfigError):
        samples = [text.sample for text in texts]
        _check(scorer, texts)
        rows = scorer.score(
            [text.text for text in texts],
            samples,
            [text.finish_reason for text in texts],
            [text.length for text in texts],
        )
    after = {column: np.array([row[column] for row in rows]) for column in scorer.columns}
    weights = {column: rewards[name].weight for name in rewards for column in columns_of(name, kinds[name])}
    return Replayed(list(texts), dict(before), after, left, weights)


def _left(rewards: Mapping[str, RewardConfig], recorded: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Names of rewards that texts alone do not tell, with the reason; and of those whose condition is one of them."""
    kinds, left = check_rewards(rewards), set[str]()
    for name, reward in kinds.items():
        why = ""
        if isinstance(reward, RemoteReward):
            why = "it asks a server"
        elif reward.per_token:
            why = "it has a number per token"
        elif rewards[name].when_needed and not {*columns_of(name, reward)} & {*recorded}:
            why = "the run did not need it"
        if why:
            left.add(name)
            yield name, why
    of_column = {column: name for name, reward in kinds.items() for column in columns_of(name, reward)}
    waiting = {name: of_column[c.condition.column] for name, c in rewards.items() if c.condition and name not in left}
    while found := next((name for name, gate in waiting.items() if gate in left), None):
        left.add(found)
        yield found, f"its condition is {waiting.pop(found)}"


def _check(scorer: Scorer, texts: Sequence[RecordedText]) -> None:
    """As a run checks its prompts; a refusal says what the record lacks."""
    try:
        scorer.check({text.sample.id: text.sample for text in texts}.values())
    except ValueError as error:
        lacks = sorted({key for text in texts for key in text.left_out})
        more = f" (the record lacks {', '.join(lacks)}, which are no JSON)" if lacks else ""
        raise ValueError(f"{error}{more}") from None


def _show(replayed: Replayed, step: int, console: Console) -> None:
    table = Table(title=f"Rewards of step {step}, {len(replayed.texts)} rollouts", title_justify="left")
    for title in ("reward", "weight", "mean then", "mean now", "differ", "largest difference"):
        table.add_column(title, justify="left" if title == "reward" else "right")
    for column in dict.fromkeys([*replayed.before, *replayed.after]):
        both = column in replayed.before and column in replayed.after
        means = [_mean(rewards.get(column)) for rewards in (replayed.before, replayed.after)]
        cells = ["-", "-"]
        if both:
            differing = replayed.differing(column)
            largest = np.abs(replayed.after[column] - replayed.before[column])[differing]
            cells = [str(int(differing.sum())), f"{np.nanmax(largest):.3g}" if differing.any() else "0"]
        table.add_row(column, f"{replayed.weights.get(column, math.nan):g}", *means, *cells)
    console.print(table)
    for name, why in replayed.left.items():
        console.print(f"{name} is not computed again: {why}")
    shown = [(i, column) for column in replayed.compared for i in np.flatnonzero(replayed.differing(column)).tolist()]
    for i, column in shown[:_SHOWN]:
        text = replayed.texts[i]
        then, now = replayed.before[column][i], replayed.after[column][i]
        tail = text.text[-_TAIL:].replace("\n", "\\n").encode(errors="backslashreplace").decode()  # half a character
        console.print(f"{text.sample.id}, rollout {text.index}: {column} {then:g} -> {now:g}  …{tail}")
    if len(shown) > _SHOWN:
        console.print(f"and {len(shown) - _SHOWN} more: --out FILE has all")


def _mean(rewards: np.ndarray | None) -> str:
    return "-" if rewards is None or np.isnan(rewards).all() else f"{np.nanmean(rewards):.4f}"


def _line(replayed: Replayed, i: int, text: RecordedText) -> dict[str, object]:
    numbers = [
        {column: None if math.isnan(values[i]) else float(values[i]) for column, values in rewards.items()}
        for rewards in (replayed.before, replayed.after)
    ]
    conversation = {"messages": text.sample.messages} if text.sample.messages else {}
    facts = {"sample": text.sample.id, "rollout": text.index, "before": numbers[0], "after": numbers[1]}
    return {**facts, "text": text.text, **conversation, "finish_reason": text.finish_reason}
