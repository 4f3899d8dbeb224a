"""Modules that compute: a decoder built of Megatron-Core's layers, and the tower that reads images."""
