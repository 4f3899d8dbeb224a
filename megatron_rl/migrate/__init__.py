"""A configuration of verl, NeMo-RL or TRL as a recipe of this package: `megatron-rl migrate`. Needs no torch."""

from megatron_rl.migrate.recipe_text import migrate

__all__ = ["migrate"]
