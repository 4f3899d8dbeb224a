"""The numbers of an evaluation from its samples, by NumPy and by counting, without the package's functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Record = Mapping[str, Any]  # of `samples/`: sample, rewards (null: no value), tokens, finish_reason
WINS = {2: [1.0] * 3, 1: [1.0], 0: [0.5], -1: [0.0], -2: [0.0] * 3}


def grouped(records: Sequence[Record], judge: str) -> list[list[Record]]:
    scored = [one for one in records if one["rewards"][judge] is not None]
    return [[one for one in scored if one["sample"] == name] for name in dict.fromkeys(one["sample"] for one in scored)]


def evaluation(
    records: Sequence[Record], judge: str, threshold: float, n: int, ks: Sequence[int], **options: Any
) -> dict[str, float]:
    """Name after `eval/<task>/` -> value. `options`: of the recipe's section `evaluation`."""
    groups = grouped(records, judge)
    right = [[one["rewards"][judge] >= threshold for one in group] for group in groups]

    def mean(value: Any) -> float:
        return float(np.mean([np.mean([value(one) for one in group]) for group in groups]))

    def column(name: str, value: Any) -> float:
        known = [[value(r["rewards"][name]) for r in group if r["rewards"][name] is not None] for group in groups]
        return float(np.mean([np.mean(group) for group in known if group]))

    shares = [np.mean(group) for group in right]
    found = {f"avg@{n}": float(np.mean(shares))}
    if len(groups) > 1:
        found["stderr"] = float(np.std(shares, ddof=1) / np.sqrt(len(groups)))
    for k in ks:  # over every choice of k responses
        each = [np.mean([any(some) for some in itertools.combinations(group, k)]) for group in right if len(group) >= k]
        found[f"pass@{k}"] = float(np.mean(each))
    found["response_length"] = mean(lambda one: one["tokens"])
    found["truncated_share"] = mean(lambda one: one["finish_reason"] == "length")
    if options.get("length_limit") is not None:
        found["exceed_share"] = mean(lambda one: one["tokens"] > options["length_limit"])
    named = {"format_ratio": lambda s: s >= 1, "bug_ratio": lambda s: s < 1, "pass_rate": float}
    for name, value in named.items():
        if (reward := options.get(f"{name.split('_ratio')[0].replace('pass_rate', 'pass_rate')}_reward")) is not None:
            found[name] = column(reward, value)
    for reward in records[0]["rewards"]:
        found[f"reward/{reward}"] = column(reward, float)
    if unscored := sum(one["rewards"][judge] is None for one in records):
        found["unscored"] = float(unscored)
    return found


def battles(records: Sequence[Record], both: Sequence[str], style: Sequence[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes of all battles, and the style of each."""
    outcomes, styles = [], []
    for one in records:
        verdicts = [one["rewards"][name] for name in both]
        if None in verdicts:
            continue
        for verdict in verdicts:
            won = WINS[int(verdict)]
            outcomes += won
            styles += [[one["rewards"][name] for name in style]] * len(won)
    return np.array(outcomes), np.array(styles)


def at_equal_style(outcomes: np.ndarray, styles: np.ndarray) -> float:
    """Of a logistic regression on all battles, by gradient ascent; features that never differ are left out."""
    kept = [i for i in range(styles.shape[1]) if len(set(np.round(styles[:, i], 12))) > 1]
    x = np.column_stack([np.ones(len(outcomes)), *(styles[:, i] / styles[:, i].std(ddof=1) for i in kept)])
    c = np.zeros(x.shape[1])
    for _ in range(20_000):
        c += 1.0 / len(outcomes) * (x.T @ (outcomes - 1 / (1 + np.exp(-x @ c))) - 1e-3 * c)
    return float(1 / (1 + np.exp(-c[0])))
