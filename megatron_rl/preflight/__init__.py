"""Whether the machines are fit for a job: every rank checks its own node, rank 0 compares them."""
