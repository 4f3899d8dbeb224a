"""Advantage estimators, one file per method."""

from megatron_rl.algorithms.estimators import (  # noqa: F401
    awpo,
    bloo,
    dr_grpo,
    gdpo,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    shrinkage,
)
