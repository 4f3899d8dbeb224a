"""Comparing tool calls with the gold calls; `tool_parsers` reads them.

Sources: GDPO, appendix C; AWPO, Eq. 12-16; ToolRL's released rewards, where those say nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from megatron_rl.rewards.tool_parsers import Call

Matching = Literal["greedy", "optimal"]
Names = Literal["multiset", "set"]


def match_share(
    gold: Sequence[Call], calls: Sequence[Call], matching: Matching, names: Names, same_name: bool = True
) -> float:
    """Total match score over the largest possible one, R_max / S_max in [0, 1] (GDPO, appendix C; AWPO, Eq. 16).

    R is the overlap of the tool names, plus for every gold call and the call it is matched with the overlap of their
    parameter names and the number of equal parameter values (Python's ==, so 1 equals 1.0 and true, but not "1").

    Args:
        gold: gold calls; for none, only the overlap of the names remains: 1 where nothing is called either, else 0.
        calls: predicted calls.
        matching: `optimal` maximises the total over all matchings, as the paper says; `greedy` gives each gold call in
            turn its best unused call, as the released code does.
        names: `multiset` counts repeated names, as the released code does; `set` does not, as the paper writes.
        same_name: only calls of the same tool can be matched.
    """
    total = _overlap([call["name"] for call in gold], [call["name"] for call in calls], multiset=names == "multiset")
    table = [
        [_pair_score(want, call) if not same_name or want["name"] == call["name"] else 0.0 for call in calls]
        for want in gold
    ]
    total += _greedy(table) if matching == "greedy" else _optimal(table)
    return total / (1 + len(gold) + sum(len(call["parameters"]) for call in gold))


def _overlap(gold: list[str], other: list[str], multiset: bool) -> float:
    """Jaccard overlap; 1 for two empty collections."""
    left, right = (Counter(gold), Counter(other)) if multiset else (Counter(set(gold)), Counter(set(other)))
    union = (left | right).total()
    return (left & right).total() / union if union else 1.0


def _pair_score(gold: Call, call: Call) -> float:
    want, have = gold["parameters"], call["parameters"]
    union = len(want.keys() | have.keys())
    keys = len(want.keys() & have.keys()) / union if union else 1.0
    return keys + sum(key in have and equal(value, have[key]) for key, value in want.items())


def equal(left: object, right: object) -> bool:
    """Equality of JSON values; false for those nested too deep to compare."""
    try:
        return bool(left == right)
    except RecursionError:  # JSON nested a thousand deep
        return False


def _greedy(table: list[list[float]]) -> float:
    used: set[int] = set()
    total = 0.0
    for row in table:
        best, best_column = 0.0, -1
        for column, score in enumerate(row):
            if score > best and column not in used:
                best, best_column = score, column
        if best_column >= 0:
            used.add(best_column)
        total += best
    return total


def _optimal(table: list[list[float]]) -> float:
    """Largest total of a matching between rows and columns, by the Hungarian method in O(rows^2 * columns)."""
    if not table or not table[0]:
        return 0.0
    if len(table) > len(table[0]):
        table = [list(column) for column in zip(*table, strict=True)]
    rows, columns = len(table), len(table[0])
    # Shortest augmenting paths with potentials, rows and columns counted from 1; column 0 holds the row being placed.
    row_price, column_price = [0.0] * (rows + 1), [0.0] * (columns + 1)
    row_of = [0] * (columns + 1)
    for row in range(1, rows + 1):
        row_of[0] = row
        column = 0
        distance, previous = [float("inf")] * (columns + 1), [0] * (columns + 1)
        done = [False] * (columns + 1)
        while row_of[column]:
            done[column] = True
            here, step, following = row_of[column], float("inf"), 0
            for other in range(1, columns + 1):
                if done[other]:
                    continue
                reduced = -table[here - 1][other - 1] - row_price[here] - column_price[other]
                if reduced < distance[other]:
                    distance[other], previous[other] = reduced, column
                if distance[other] < step:
                    step, following = distance[other], other
            for other in range(columns + 1):
                if done[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                else:
                    distance[other] -= step
            column = following
        while column:
            row_of[column], column = row_of[previous[column]], previous[column]
    return sum(table[row_of[column] - 1][column - 1] for column in range(1, columns + 1) if row_of[column])
