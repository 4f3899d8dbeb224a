"""`megatron-rl prove-resume` as a stand-alone command; `--help` has the options."""

from __future__ import annotations

import sys

from megatron_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["prove-resume", *sys.argv[1:]]))
