"""The program that a rank of the trainer runs: its imports, its attempt, its memory."""
