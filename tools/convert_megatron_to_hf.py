"""`megatron-rl convert to-hf` as a stand-alone command; `--help` has the options, docs/conversion.md the rest."""

from __future__ import annotations

import sys

from megatron_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
