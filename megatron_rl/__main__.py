"""`python -m megatron_rl`: the same as `megatron-rl`."""

import sys

from megatron_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
