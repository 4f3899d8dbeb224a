"""The module that a family names, which computes it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from megatron_rl.models.family import Family, ModelDescription

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_rl.seams.megatron import Chunk


class Build(Protocol):
    """Makes one chunk of this rank's model, uninitialised, at its pipeline stage in Megatron's groups."""

    def __call__(
        self, description: ModelDescription, config: TransformerConfig, vocab_size: int, vp_stage: int | None
    ) -> Chunk:
        """`vocab_size`: padded. `vp_stage`: the virtual pipeline stage; None: there is one."""


def builder(family: Family) -> Build:
    """The `build` of the file of this package that the family names; imported here, with what it needs."""
    return cast(Build, import_module(f"megatron_rl.modules.{family.module}").build)
