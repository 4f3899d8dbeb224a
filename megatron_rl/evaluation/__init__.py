"""Metrics of the responses to held-out prompts, with intervals (Avg@k, Pass@k and others); responses from a served model."""
