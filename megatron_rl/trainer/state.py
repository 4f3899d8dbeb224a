"""How far a run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.data.like_lengths import LENGTHS, LikeLengths
from megatron_rl.rollout.ahead import AHEAD, Batch
from megatron_rl.rollout.ahead import pack as pack_ahead
from megatron_rl.rollout.partial import WAITING, Waiting, pack
from megatron_rl.runtime.distributed import ProcessGrid

if TYPE_CHECKING:  # an evaluation of a served model has no Megatron-Core
    from megatron_rl.checkpoint.store import SavedState


@dataclass(frozen=True)
class State:
    """Progress of a run: all that a checkpoint holds besides weights, optimizer and estimator.

    Randomness needs no state: every seed is a function of the recipe's seed and the step. Nor does the sampler: which prompts
    come next follows from `position`, behind those of `ahead` and of the queue of `by_length`, and what waits of partial
    rollouts is `waiting`.
    """

    step: int = 0  # RL steps done (or SFT steps, under `megatron-rl sft`)
    warm_up: int = 0  # SFT steps of the warm-up before RL done
    position: int = 0  # training prompts taken
    warming_up: bool = False  # in the SFT steps before RL
    groups_drawn: int = 0  # with dynamic sampling: until the last step had its groups; 0: before the first
    # With partial rollouts: what is open; None: nothing. Where others generate, packed, on rank 0 when a checkpoint is due.
    waiting: Waiting | bytes | None = None
    ahead: Batch | None = None  # with split placement: the next step's, which is drawn already; None: nothing is
    by_length: LikeLengths | None = None  # with steps of like lengths

    @classmethod
    def of(cls, saved: SavedState) -> State:
        progress = saved["progress"]
        so_far = progress["step"], progress["warm_up"], progress["position"], saved.get("warm_up", False)
        return cls(*so_far, progress.get("groups_drawn", 0))

    @property
    def stage_step(self) -> int:
        """Steps done of the stage that the run is in."""
        return self.warm_up if self.warming_up else self.step

    def files(self, grid: ProcessGrid) -> dict[str, bytes]:
        """A checkpoint's files, on rank 0: what was drawn and not trained on, and what was taken and not drawn. Every rank
        calls it."""
        waiting = pack(grid, self.waiting) if isinstance(self.waiting, Waiting) else self.waiting
        ahead = None if self.ahead is None else pack_ahead(grid, self.ahead)
        lengths = self.by_length.pack() if self.by_length is not None and grid.is_main else None
        files = {WAITING: waiting, AHEAD: ahead, LENGTHS: lengths}
        return {name: content for name, content in files.items() if content is not None}

    def progress(self) -> dict[str, int]:
        drawn = {"groups_drawn": self.groups_drawn} if self.groups_drawn else {}
        return {"step": self.step, "warm_up": self.warm_up, "position": self.position} | drawn
