"""The report page of a self-test, from its steps' results. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from megatron_rl.runtime import provenance
from megatron_rl.selftest.steps import SelfTestStep

OK, FAILED, LEFT_OUT = "ok", "FAILED", "left out"
Figures = Mapping[str, float | str]


@dataclass(frozen=True)
class Result:
    """Result of a step: `text` is the failure, or why it was left out."""

    step: SelfTestStep
    verdict: str
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    text: str = ""

    def line(self) -> str:
        """Formats a result for the terminal."""
        said = self.text or ", ".join(f"{name} {shown(value)}" for name, value in list(self.figures.items())[:4])
        return f"{self.verdict:<8}  {self.step.name:<15}  {self.seconds:6.1f} s  {said}"


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def page(results: Sequence[Result], command: Sequence[str]) -> str:
    """Markdown: the machine, a verdict per step, every figure."""
    about = provenance.surroundings()
    versions = about["versions"]
    assert isinstance(versions, dict)
    lines = [
        "# Self-test",
        "",
        f"- {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {about['host']}: {about['platform']}, {about['cpus']} cores, "
        f"{about['memory_gib']} GiB",
        f"- cards (name, driver, memory): {'; '.join(provenance.gpus()) or 'none'}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- command: `{' '.join(command)}`",
        "",
        "| step | verdict | s | question |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{r.step.name}` | {r.verdict} | {r.seconds:.1f} | {r.step.question} |" for r in results]
    for result in results:
        if result.text:
            lines += ["", f"## {result.step.name}: {result.verdict}", "", result.text]
        elif result.figures:
            lines += ["", f"## {result.step.name}", "", "| figure | |", "|---|---|"]
            lines += [f"| {name} | {shown(value)} |" for name, value in result.figures.items()]
    if not provenance.gpus():
        lines += ["", "There is no GPU here: no figure on this page is one of a GPU."]
    return "\n".join(lines) + "\n"
