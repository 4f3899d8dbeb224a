"""The rollouts that a page shows: a few groups over the run, and extreme ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_rl.report.run import RolloutRow


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt in one step, as far as they were written."""

    step: int
    rollouts: Sequence[RolloutRow]

    @property
    def reward(self) -> float:
        """Mean over rollouts of the sum of all reward columns; a score that never came counts as 0."""
        return fmean(sum(value or 0.0 for value in rollout["rewards"].values()) for rollout in self.rollouts)

    @property
    def longest(self) -> int:
        return max(rollout["tokens"] for rollout in self.rollouts)

    @property
    def cut(self) -> int:
        """Rollouts that ended at the token limit."""
        return sum(rollout.get("finish_reason") == "length" for rollout in self.rollouts)


def groups_of(samples: Mapping[int, Sequence[RolloutRow]]) -> list[Group]:
    """The groups of every step, in order. Rows of old runs have no sample id: their prompt tells them apart."""
    found = []
    for step, rows in samples.items():
        by_prompt: dict[str, list[RolloutRow]] = {}
        for row in rows:
            by_prompt.setdefault(str(row.get("sample", row["prompt"])), []).append(row)
        found += [Group(step, rollouts) for rollouts in by_prompt.values()]
    return found


def chosen_groups(samples: Mapping[int, Sequence[RolloutRow]]) -> list[tuple[Group, list[str]]]:
    """A handful of groups with why each was chosen, in the order of their steps.

    The first of the first, middle and last step; and of all the one with the highest and the lowest reward, the one with the
    longest response, and the one with most responses cut at the token limit, the latest where several are equal.
    """
    groups = groups_of(samples)
    if not groups:
        return []
    steps = sorted({group.step for group in groups})
    first_of = {group.step: group for group in reversed(groups)}
    wanted = [(first_of[steps[0]], "first step")]
    if len(steps) > 2:
        wanted.append((first_of[steps[len(steps) // 2]], "middle"))
    if len(steps) > 1:
        wanted.append((first_of[steps[-1]], "last step"))
    latest = groups[::-1]  # max takes the first of equal ones
    wanted.append((max(latest, key=lambda group: group.reward), "highest reward"))
    wanted.append((min(latest, key=lambda group: group.reward), "lowest reward"))
    wanted.append((max(latest, key=lambda group: group.longest), "longest response"))
    most_cut = max(latest, key=lambda group: group.cut)
    if most_cut.cut:
        wanted.append((most_cut, "cut at the token limit"))
    reasons: dict[int, tuple[Group, list[str]]] = {}
    for group, why in wanted:
        reasons.setdefault(id(group), (group, []))[1].append(why)
    return sorted(reasons.values(), key=lambda item: item[0].step)
