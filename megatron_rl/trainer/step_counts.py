"""What sampling and scoring counted in a step: counts add up, of ranks, and of a step and the evaluation after it, which with
split placement other ranks have done than the one that logs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.rewards import ScoringStats


@dataclass
class StepCounts:
    """`scoring`: what slow rewards did. `drafts`: of all engines, see `Drafts.take_counts`."""

    scoring: ScoringStats = field(default_factory=ScoringStats)
    drafts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> StepCounts:
        """Undoes `plain`; nothing was counted where it is empty."""
        if not plain:
            return cls()
        return cls(ScoringStats.of(plain["scoring"]), Counter(plain["drafts"]))

    def plain(self) -> dict[str, Any]:
        """As JSON has it, without the answers of servers."""
        return {"scoring": self.scoring.plain(), "drafts": dict(self.drafts)}

    def __iadd__(self, other: StepCounts) -> StepCounts:
        self.scoring += other.scoring
        self.drafts += other.drafts
        return self

    def metrics(self) -> dict[str, float]:
        drafts, metrics = self.drafts, self.scoring.metrics()
        if drafts["drafted"]:
            metrics["rollouts/draft_acceptance"] = drafts["accepted"] / drafts["drafted"]
            metrics["rollouts/drafted_share"] = drafts["accepted"] / drafts["drawn"]
            metrics["rollouts/drafted_share_below"] = drafts["accepted"] / drafts["drawn_below"]
        return metrics
