r"""How often the `math` reward errs, beside math-verify used directly: known right and wrong answers of many formats.

`python -m benchmarks.grading` makes gold answers of 18 kinds by seed, writes each in ways that are right, right in value
but not in form, and wrong, grades them all and prints a table. `--golds FILE --column solution` does so with the answers of a
JSON Lines file: the gold answer in a box is right; plus one, negated, doubled, with another digit or answer beside it, it is
wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.grading_cases import RIGHT, VALUE, WRONG, Case, cases
from benchmarks.others import told
from megatron_rl.rewards.gold_checks import wrong_answers
from megatron_rl.rewards.isolation import Isolated, RewardProcessError
from megatron_rl.rewards.maths import gold_text
from megatron_rl.rewards.maths_strict import gold_answer

GRADERS = {
    "lenient": "megatron_rl.rewards.maths_lenient:same_answer",
    "strict": "megatron_rl.rewards.maths_strict:strictly_same",
    "math-verify": "benchmarks.grading:by_math_verify",
}
SHOWN = 5  # errors per kind and grader that --errors prints


def by_math_verify(completion: str, gold: str) -> bool:
    """math-verify as its documentation shows it."""
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    bare = gold.replace("\\$", "")  # money, not a delimiter
    marked = bare if "$" in bare or "\\boxed" in bare else f"${bare}$"
    target, given = parse(marked, parsing_timeout=None), parse(completion, parsing_timeout=None)
    return bool(verify(target, given, timeout_seconds=None))


def cases_of(golds: list[str], name: str) -> list[Case]:
    """The gold answers of a data set in a box, and the wrong answers that can be made of them."""
    made = []
    for gold in golds:
        answer = gold_answer(gold).replace("$", "")
        made.append(Case(name, gold, f"\\boxed{{{answer}}}", RIGHT))
        if not any(character.isdigit() for character in answer):
            continue
        at = max(i for i, character in enumerate(answer) if character.isdigit())
        digit = answer[:at] + str((int(answer[at]) + 1) % 10) + answer[at + 1 :]
        wrong = [*wrong_answers(gold), f"{answer}, 99", f"{answer} \\text{{ or }} 99", digit]
        made += [Case(name, gold, f"\\boxed{{{text}}}", WRONG) for text in wrong]
    return made


def grade(todo: list[Case], function: str, timeout_seconds: float) -> tuple[list[bool], int, float]:
    """Verdicts, comparisons that ran into the deadline or raised, and seconds."""
    isolated = Isolated(function, ("math_verify",), timeout_seconds)
    verdicts, raised, start = [], 0, time.monotonic()
    try:
        for case in todo:
            try:
                verdicts.append(bool(isolated(case.completion, case.gold)))
            except RewardProcessError:
                verdicts.append(False)
                raised += 1
    finally:
        isolated.close()
    return verdicts, isolated.timeouts + raised, time.monotonic() - start


def errors(todo: list[Case], verdicts: list[bool], strict: bool) -> tuple[Counter[str], Counter[str], list[Case]]:
    """Per kind: right answers refused, and wrong ones accepted; and all of them. Strict grading refuses VALUE, rightly."""
    refused, accepted, found = Counter[str](), Counter[str](), []
    for case, verdict in zip(todo, verdicts, strict=True):
        right = case.truth == RIGHT or (case.truth == VALUE and not strict)
        if verdict != right:
            (refused if right else accepted)[case.kind] += 1
            found.append(case)
    return refused, accepted, found


def _print_table(todo: list[Case], timeout_seconds: float, show: bool) -> None:
    counts = Counter((case.kind, case.truth) for case in todo)
    results = {}
    for name, function in GRADERS.items():
        verdicts, stopped, seconds = grade(todo, function, timeout_seconds)
        results[name] = errors(todo, verdicts, strict=name == "strict")
        print(f"{name}: {len(todo)} comparisons in {seconds:.0f} s, {stopped} stopped or raised", file=sys.stderr)
    print(f"| kind | right | right value | wrong | {' | '.join(f'{name}: refused, accepted' for name in GRADERS)} |")
    print("|---" * (4 + len(GRADERS)) + "|")
    for kind in [*dict.fromkeys(case.kind for case in todo), "all"]:
        kinds = [k for k, _ in counts] if kind == "all" else [kind]
        numbers = [sum(counts[k, truth] for k in dict.fromkeys(kinds)) for truth in (RIGHT, VALUE, WRONG)]
        cells = [
            f"{sum(refused[k] for k in dict.fromkeys(kinds))}, {sum(accepted[k] for k in dict.fromkeys(kinds))}"
            for refused, accepted, _ in results.values()
        ]
        print(f"| {kind} | {' | '.join(map(str, numbers))} | {' | '.join(cells)} |")
    if show:
        for name, (_, _, found) in results.items():
            shown = Counter[str]()
            for case in found:
                shown[case.kind] += 1
                if shown[case.kind] <= SHOWN:
                    print(f"{name}, {case.kind}, {case.truth}: {case.completion!r} for {case.gold!r:.200}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=5000, help="answers to grade (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="of the gold answers (default: 0)")
    parser.add_argument(
        "--golds", type=Path, help="a JSON Lines file with gold answers of your own, in place of made ones"
    )
    parser.add_argument("--column", default="answer", help="its column with the gold answer (default: answer)")
    parser.add_argument("--gold-after", help="the gold answer is what follows the last such text")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds a comparison may take (default: 5)")
    parser.add_argument("--errors", action="store_true", help=f"print up to {SHOWN} errors per kind and grader")
    args = parser.parse_args()
    if args.golds is None:
        todo = cases(args.count, args.seed)
    else:
        rows = [json.loads(line) for line in args.golds.read_text("utf-8").splitlines() if line.strip()]
        golds = [gold_text(row[args.column], args.gold_after) for row in rows if row.get(args.column) is not None]
        todo = cases_of(golds, args.golds.stem)
    _print_table(todo, args.timeout, args.errors)
    return 0


if __name__ == "__main__":
    with told():
        sys.exit(main())
