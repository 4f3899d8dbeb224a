"""Compares estimators and gradient weights on the rollouts that a run has recorded."""
