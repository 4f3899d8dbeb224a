"""A process that starts ranks and waits for them; for `warm.run_ranks`, with its arguments as JSON."""

import json
import sys
from pathlib import Path

from megatron_rl.runtime.spawn import run_ranks

if __name__ == "__main__":
    command, processes, log_dir, environment = json.loads(sys.argv[1])
    outcome = run_ranks(command, processes, Path(log_dir), environment)
    print(outcome.message, file=sys.stderr)
    sys.exit(outcome.code)
