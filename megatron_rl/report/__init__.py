"""A run folder, or several side by side, as one HTML page: `megatron-rl report`. Reads files only; needs no torch."""

from megatron_rl.report.findings import Finding, find
from megatron_rl.report.page import render
from megatron_rl.report.run_record import RunRecord, read_run
