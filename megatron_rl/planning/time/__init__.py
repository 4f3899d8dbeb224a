"""How long a step takes, from the recipe, the model's sizes and tables of hardware. No torch, no GPU, plain arithmetic.

`hardware`: what a GPU and its links do; `lengths`: how long responses are; `kernels`: products, attention, collectives;
`training` and `generation`: a micro-batch and a decoding step; `step`: the phases of a step; `calibrate`: a run's own times;
`search`: the layouts that fit, the fastest first.
"""
