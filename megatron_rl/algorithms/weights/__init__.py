"""Gradient weights F(w, A), one file per method. All work on log-ratios; none overflows for finite input."""

from megatron_rl.algorithms.weights import aspo, ce_gppo, cispo, clip, dgpo, gppo, unclipped  # noqa: F401
