"""What the papers claim of training, as sentences that numbers decide: what is compared, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.report.significance import PairedDifference, paired_difference

MORE, NOT_MORE, SAME = "more", "not more", "the same"
LEVEL = 0.05  # of significance

Numbers = Mapping[str, Mapping[str, Sequence[float]]]  # line -> measure -> a number per seed


@dataclass(frozen=True)
class Side:
    """One of two numbers that are compared: of which line (its position), which measure."""

    line: int
    measure: str


@dataclass(frozen=True)
class Statement:
    """A sentence about two numbers.

    Attributes:
        text: the sentence.
        first, second: what it compares.
        expects: that the first is `MORE` than the second, `NOT_MORE`, or exactly `SAME`, seed by seed.
        source: where the paper says so; "control": a method without its essential term, whose effect must be gone.
    """

    text: str
    first: Side
    second: Side
    expects: str
    source: str

    def difference(self, numbers: Numbers) -> PairedDifference:
        """The first less the second, over the seeds."""
        lines = list(numbers.values())
        first, second = (lines[side.line][side.measure] for side in (self.first, self.second))
        return paired_difference(second, first)

    def verdict(self, numbers: Numbers) -> str:
        """`holds`, `does not hold` (the opposite is significant, or a control has the effect), or `not shown`."""
        difference = self.difference(numbers)
        more = difference.p < LEVEL and difference.mean > 0
        less = difference.p < LEVEL and difference.mean < 0
        if self.expects == SAME:
            lines = list(numbers.values())
            first, second = (list(lines[side.line][side.measure]) for side in (self.first, self.second))
            return "holds" if first == second else "does not hold"
        if self.expects == NOT_MORE:
            return "does not hold" if more else "holds"
        return "holds" if more else "does not hold" if less else "not shown"


@dataclass(frozen=True)
class Claim:
    """A paper's claim about training.

    Attributes:
        title: the section's heading.
        says: the paper's sentence, in ours.
        measures: headings of the numbers that are kept, in order.
        statements: what must hold for the claim to hold, controls among them.
        tabulates: the page has every line's means; else what the record has in `more`.
    """

    title: str
    says: str
    measures: Sequence[str]
    statements: Sequence[Statement]
    tabulates: bool = True


@dataclass(frozen=True)
class Record:
    """What a claim's runs gave, and how they were made; a file beside the page.

    Attributes:
        numbers: by line, measure and seed.
        seeds: in the order of the numbers.
        commit, date: of the code.
        minutes: of CPU, of all runs.
        files: recipe, sweep and code that the runs depend on.
        digest: of what these files held, `digest.digest`.
        more: Markdown that follows the tables.
        taken_over: runs that an earlier call had finished, whose minutes are not counted.
    """

    numbers: Numbers
    seeds: Sequence[int]
    commit: str
    date: str
    minutes: float
    files: Sequence[str]
    digest: str
    more: str = ""
    taken_over: int = 0

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_record(path: Path) -> Record:
    return Record(**json.loads(path.read_text()))


def outcome(claim: Claim, record: Record) -> str:
    """Says what came of a claim in all: it holds where all its sentences do."""
    verdicts = [statement.verdict(record.numbers) for statement in claim.statements]
    held = verdicts.count("holds")
    return "holds" if held == len(verdicts) else f"holds in {held} of {len(verdicts)} sentences"
