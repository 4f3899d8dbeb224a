"""What the responses to held-out prompts say, with intervals (Avg@k, Pass@k and others), and how a served model is asked."""
