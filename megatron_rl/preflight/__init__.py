"""Whether the machines are fit for a job: every rank checks its own node, rank 0 compares them."""

from megatron_rl.preflight.findings import Finding, Report
from megatron_rl.preflight.run import preflight
