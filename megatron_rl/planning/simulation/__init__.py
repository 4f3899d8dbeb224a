"""A discrete simulation of RL steps: engines that decode until their sequences end, what follows, failures. No torch."""
