"""Mixtures of experts: which expert a token goes to, and the order of tokens by expert."""
