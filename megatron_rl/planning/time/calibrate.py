"""A run's own times against their prediction: factors by phase, and the lengths that it drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from megatron_rl.config import Config
from megatron_rl.planning.components import MemoryPlan
from megatron_rl.planning.time.lengths import Lengths, read_lengths, recorded_files
from megatron_rl.planning.time.step import REWARD, Predictor
from megatron_rl.report.status import read_rows

_UNPREDICTED = ("estimate", "switch", "sync_check")


@dataclass(frozen=True)
class MeasuredRun:
    """Times of the steps of a run, from its folder.

    Attributes:
        seconds: median of the later half of its steps, by phase (`timing_s/...`).
        lengths: of its responses, as drawn.
        gpus: its processes.
        drafted_share: of the tokens drawn with drafts, those that were guessed (`rollouts/drafted_share_below`).
    """

    folder: Path
    seconds: Mapping[str, float]
    lengths: Lengths
    gpus: int
    drafted_share: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> MeasuredRun:
        """Raises:
        ValueError: the folder has no recipe, no steps or no logs.
        """
        rows = [row for row in read_rows(folder / "metrics.jsonl") if "timing_s/step" in row]
        attempts = sorted((folder / "logs").glob("attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        ranks = [len(list(attempt.glob("rank_*.log"))) for attempt in attempts]
        if not (folder / "recipe.yaml").is_file() or not rows or not any(ranks):
            raise ValueError(f"{folder} is no folder of a run with steps: it needs recipe.yaml, metrics.jsonl and logs")
        rows = rows[len(rows) // 2 :]
        names = {name.removeprefix("timing_s/") for row in rows for name in row if name.startswith("timing_s/")}
        seconds = {name: median(row.get(f"timing_s/{name}", 0.0) for row in rows) for name in names - {"step"}}
        drafted = fmean(row.get("rollouts/drafted_share_below", 0.0) for row in rows)
        return cls(folder, seconds, _lengths(folder, rows), [count for count in ranks if count][-1], drafted)


def _lengths(folder: Path, rows: Sequence[Mapping[str, float]]) -> Lengths:
    """Lengths of the newest file of recorded rollouts; where there is none, log-normal up to the longest."""
    prompt = fmean(row["prompt_length/mean"] for row in rows)
    if recorded := recorded_files(folder):
        return Lengths.recorded(read_lengths(recorded[-1])[0].ravel(), prompt)
    mean = fmean(row["response_length/mean"] for row in rows)
    longest = max(row["response_length/max"] for row in rows)
    return Lengths.log_normal(mean, round(longest) + 1, prompt=prompt)


def calibrated(predictor: Predictor, run: MeasuredRun, config: Config, plan: MemoryPlan) -> Predictor:
    """`predictor` with factors that make it give the run's own times for the run's recipe, `config` in the layout of `plan`;
    what is not predicted takes as long as in the run."""
    as_drawn = replace(predictor, lengths=run.lengths, drafted_share=run.drafted_share, factors={})
    predicted = as_drawn.of(config, plan).seconds
    factors = {
        phase: run.seconds[phase] / seconds
        for phase, seconds in predicted.items()
        if run.seconds.get(phase) and phase != REWARD
    }
    others = {phase: run.seconds[phase] for phase in _UNPREDICTED if run.seconds.get(phase)}
    return replace(predictor, factors=factors, others=others, reward_seconds=run.seconds.get(REWARD, 0.0))
