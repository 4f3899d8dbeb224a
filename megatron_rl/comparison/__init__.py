"""Compares estimators and surrogates on the rollouts that a run has recorded."""
