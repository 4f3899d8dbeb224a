"""A rank of `megatron-rl selftest`, whose actor's feed-forward layers give a little more in steps `mismatch` and `exact`."""

import sys
from pathlib import Path
from typing import Any

from megatron_rl.selftest import rank


def main(step: str, folder: Path) -> None:
    if step in ("mismatch", "exact"):
        from megatron.core.transformer.mlp import MLP

        forward = MLP.forward

        def more(self: MLP, *arguments: Any, **options: Any) -> Any:
            output, bias = forward(self, *arguments, **options)
            return output * (1 + 2**-4), bias

        MLP.forward = more  # type: ignore[method-assign]
    rank.main(step, folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
