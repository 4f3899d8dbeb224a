"""Against TRL and verl themselves, in the environment of `make bench-peers`."""
