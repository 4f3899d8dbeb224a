"""Whether the machines are fit for a job: every rank checks its own node, rank 0 compares them."""

from megatron_rl.preflight.across_ranks import preflight
from megatron_rl.preflight.verdict import NodeFinding, Report
