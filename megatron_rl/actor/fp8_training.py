"""FP8 training options: from the recipe's four names to Megatron-Core's, refused where they cannot run."""

from __future__ import annotations

import torch

from megatron_rl.config.actor import FP8Config
from megatron_rl.runtime import device

# Compute capability each recipe needs: Hopper is 9.0, Blackwell 10.0.
_NEEDS = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
# Rows that share a scale, which no rank may cut where sequence parallelism gathers FP8 rows; matrix products want 16.
_ROWS = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}


def rows_multiple(config: FP8Config | None) -> int:
    """The multiple that a rank's number of tokens is padded to for `actor.fp8`; 1 where it is null."""
    return 1 if config is None else _ROWS[config.recipe]


def megatron_options(config: FP8Config | None) -> dict[str, str | bool | int]:
    """`TransformerConfig` fields for `actor.fp8`; {} where it is null.

    Raises:
        ValueError: where there is no GPU, no Transformer Engine, or a card that lacks the recipe.
    """
    if config is None:
        return {}
    if config.recipe not in _NEEDS:
        raise ValueError(f"actor.fp8.recipe={config.recipe!r} is unknown; one of {', '.join(_NEEDS)}")
    if not device.has_transformer_engine():
        if not device.has_gpu():
            raise ValueError("actor.fp8 needs a GPU and this machine has none; remove `actor.fp8` (actor.fp8=null)")
        raise ValueError("actor.fp8 needs Transformer Engine, which is not installed; install the `gpu` extra")
    capability = torch.cuda.get_device_capability()
    if capability < _NEEDS[config.recipe]:
        raise ValueError(
            f"actor.fp8.recipe={config.recipe} needs compute capability {_NEEDS[config.recipe]}, this card "
            f"({torch.cuda.get_device_name()}) has {capability}"
        )
    return {
        "fp8": config.format,
        "fp8_recipe": config.recipe,
        "fp8_param": config.param_gather,
        "first_last_layers_bf16": config.bf16_ends > 0,
        "num_layers_at_start_in_bf16": config.bf16_ends,
        "num_layers_at_end_in_bf16": config.bf16_ends,
    }
