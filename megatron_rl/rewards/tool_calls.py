"""Comparing tool calls with the gold calls; `tool_parsers` reads them.

Sources: GDPO, appendix C; AWPO, Eq. 12-16; ToolRL's released rewards, where those say nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from megatron_rl.rewards.kinds import Remark
from megatron_rl.rewards.tool_parsers import Call

Matching = Literal["greedy", "optimal"]
Names = Literal["multiset", "set"]
_SHOWN = 200  # characters of a value in a remark


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
    table = _table(gold, calls, same_name)
    total += sum(table[i][j] for i, j in _PAIRS[matching](table))
    return total / (1 + len(gold) + sum(len(call["parameters"]) for call in gold))


def call_remarks(
    gold: Sequence[Call], calls: Sequence[Call], matching: Matching, same_name: bool = True
) -> list[Remark]:
    """Remarks on what is right and what is wrong: names, parameter names and values of gold calls and those they are matched
    with."""
    table = _table(gold, calls, same_name)
    pairs = {i: j for i, j in _PAIRS[matching](table) if table[i][j]}
    remarks: list[Remark] = [] if gold or calls else [("no call, and none is wanted", True)]
    for i, want in enumerate(gold):
        left = (j for j, call in enumerate(calls) if call["name"] == want["name"] and j not in pairs.values())
        if (pair := pairs.get(i, next(left, None))) is None:
            remarks.append((f"{want['name']} is not called", False))
            continue
        pairs[i], have = pair, calls[pair]["parameters"]
        wanted = "" if calls[pair]["name"] == want["name"] else f", wanted {want['name']}"
        remarks.append((f"{calls[pair]['name']}{wanted}", not wanted))
        for key, value in want["parameters"].items():
            if key not in have:
                remarks.append((f"  {key} is missing, wanted {_shown(value)}", False))
            elif equal(value, have[key]):
                remarks.append((f"  {key}: {_shown(have[key])}", True))
            else:
                remarks.append((f"  {key}: {_shown(have[key])}, wanted {_shown(value)}", False))
        remarks += [(f"  {key} is no parameter that is wanted", False) for key in have if key not in want["parameters"]]
    return remarks + [
        (f"{call['name']} is not wanted", False) for j, call in enumerate(calls) if j not in pairs.values()
    ]


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:  # JSON nested a thousand deep
        return "…"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def _table(gold: Sequence[Call], calls: Sequence[Call], same_name: bool) -> list[list[float]]:
    """Scores of all pairs, [gold calls][calls]."""
    return [
        [_pair_score(want, call) if not same_name or want["name"] == call["name"] else 0.0 for call in calls]
        for want in gold
    ]


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
    with contextlib.suppress(RecursionError):  # JSON nested a thousand deep
        return bool(left == right)
    return False


def _greedy(table: list[list[float]]) -> list[tuple[int, int]]:
    used: dict[int, int] = {}  # column -> row
    for number, row in enumerate(table):
        best, best_column = 0.0, -1
        for column, score in enumerate(row):
            if score > best and column not in used:
                best, best_column = score, column
        if best_column >= 0:
            used[best_column] = number
    return [(row, column) for column, row in used.items()]


def _optimal(table: list[list[float]]) -> list[tuple[int, int]]:
    """The matching with the largest total of rows and columns, by the Hungarian method in O(rows^2 * columns)."""
    if not table or not table[0]:
        return []
    if turned := len(table) > len(table[0]):
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
    pairs = [(row_of[column] - 1, column - 1) for column in range(1, columns + 1) if row_of[column]]
    return [(column, row) for row, column in pairs] if turned else pairs


_PAIRS = {"greedy": _greedy, "optimal": _optimal}
