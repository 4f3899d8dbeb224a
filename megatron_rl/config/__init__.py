"""Recipes: their schema, how they are read, and what must hold between their keys. Imports no torch."""

from megatron_rl.base.messages import ConfigError
from megatron_rl.config.checks import check, check_machine
from megatron_rl.config.load import as_tree, changes, load_recipe, to_yaml
from megatron_rl.config.machine import Machine
from megatron_rl.config.schema import Config

__all__ = ["Config", "ConfigError", "Machine", "as_tree", "changes", "check", "check_machine", "load_recipe", "to_yaml"]
