"""The findings of a pre-flight, as text and as JSON. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypedDict

from megatron_rl.base.messages import count

FAILED, WARNING = "failed", "warning"
Problems = Iterator[tuple[str, str]]  # (level, sentence)


class Measured(TypedDict, total=False):
    clock_skew_s: float
    allreduce_gb_per_s: float
    links_gb_per_s: dict[str, float]  # "node -> node"
    read_gb_per_s: float  # from the file system of models and checkpoints, by all ranks together
    resume_minutes: float  # to read a checkpoint once at that speed


@dataclass(frozen=True)
class NodeFinding:
    """Something that is not as it should be, on one node (or between nodes)."""

    check: str  # what was looked at
    level: str  # `failed`: the job must not start; `warning`: it may
    node: str  # where; several separated by commas
    text: str  # what is wrong, and the remedy


@dataclass
class Report:
    """All findings, and what was measured on the way."""

    nodes: list[str]
    ranks: int
    checks: list[str]
    findings: list[NodeFinding] = field(default_factory=list)
    measured: Measured = field(default_factory=Measured)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return any(finding.level == FAILED for finding in self.findings)

    def text(self) -> str:
        """Problems only, worst first; then one line."""
        lines = [
            f"  {finding.level:<7}  {finding.node:<16}  {finding.check:<12}  {finding.text}"
            for finding in sorted(self.findings, key=lambda finding: (finding.level, finding.node, finding.check))
        ]
        verdict = "NOT FIT" if self.failed else "fit, with warnings" if self.findings else "fit"
        speed, read = self.measured.get("allreduce_gb_per_s"), self.measured.get("read_gb_per_s")
        resume = self.measured.get("resume_minutes")
        numbers = {"node": len(self.nodes), "rank": self.ranks, "check": len(self.checks)}
        looked = ", ".join(count(number, noun) for noun, number in numbers.items())
        lines.append(
            f"pre-flight: {looked} in {self.seconds:.1f} s: {verdict}"
            + (f"; all-reduce {speed:.2f} GB/s" if speed else "")
            + (f"; files are read at {read:.2f} GB/s" if read else "")
            + (f", a checkpoint in about {resume:.1f} min" if resume else "")
        )
        return "\n".join(lines)

    def json(self) -> str:
        return json.dumps({"fit": not self.failed, **asdict(self)}, indent=1)


def merged(findings: Sequence[NodeFinding]) -> list[NodeFinding]:
    """The same finding of several nodes (or ranks of one) in one entry."""
    nodes: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        names = nodes.setdefault((finding.check, finding.level, finding.text), [])
        if finding.node not in names:
            names.append(finding.node)
    return [NodeFinding(check, level, ", ".join(names), text) for (check, level, text), names in nodes.items()]
