"""What GPU machines install, tried where there is no card: `make check-gpu-set`."""
