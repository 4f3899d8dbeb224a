"""When generation pauses with partial rollouts. Imports no torch, so that `plan --simulate` goes by the same rule."""

from __future__ import annotations

from collections.abc import Sequence


def trained_groups(
    finished: Sequence[bool], opened: Sequence[int], step: int, count: int, max_staleness: int
) -> list[int]:
    """Places of the `count` groups that `step` trains on: the oldest that are finished. [] while generation has to go on.

    It goes on, too, until those that then are left can be trained on in time: a group at most `max_staleness` steps after the
    one that opened it. With at most `(max_staleness + 1) * count` groups open this is always possible.

    Args:
        opened: the step that each group was opened in, the oldest first.
    """
    chosen = [place for place, done in enumerate(finished) if done][:count]
    if len(chosen) < count:
        return []
    left = [opened[place] for place in set(range(len(opened))) - set(chosen)]
    return chosen if can_wait(left, step, count, max_staleness) else []


def can_wait(opened: Sequence[int], step: int, count: int, max_staleness: int) -> bool:
    """Whether groups that wait after `step` can all be trained on in time by steps of `count` groups. `opened`: the step that
    each was opened in."""
    left = [opening + max_staleness - step for opening in opened]  # steps
    return all(sum(due <= later for due in left) <= later * count for later in range(max_staleness + 1))
