"""`megatron-rl selftest`: the parts of the stack one after the other on this node, smallest first, each with its figures."""
