"""What stands in for the compiled part of Transformer Engine 2.20, so that its own Python runs on a CPU.

Each function has the name and the parameters of one that `transformer_engine_torch` offers, and computes it in plain torch;
`install` puts them into a module of that name. One file per subject. The types are those of Transformer Engine's Python.
"""
