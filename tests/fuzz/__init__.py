"""Fuzzers. `make fuzz` runs each for a while; the test suite runs the first cases of each with fixed seeds."""
