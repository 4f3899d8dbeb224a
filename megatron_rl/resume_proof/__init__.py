"""Whether a run that is killed and continued ends as the run that was never killed: bit for bit."""
