"""What other estimators and gradient weights make of the rollouts that a run has recorded."""
