"""Rotary position embeddings and their scalings, as config.json has them; `modules.rotary` computes the frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_rl.models.hf_config import JSON, Fields, HFConfig

_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")
_UNSCALED = ("rope_theta", "partial_rotary_factor")  # fields that a scaling leaves alone
_MOST_POSITIONS = 2**53  # as many as a float tells apart
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rope:
    """A decoder's rotary position embedding (Su et al. 2021): frequencies, and a scaling of them.

    Attributes:
        kind: default, linear, llama3 or yarn.
        theta: the base of the frequencies.
        share: of a head's dimensions, from the first, that turn.
        factor: by which positions (linear) or frequencies (llama3, yarn) are stretched.
        original: tokens of the longest sequence before that (llama3, yarn).
        low, high: turns within `original` below which a frequency is divided by `factor`, above which it is kept (llama3).
        beta_slow, beta_fast: the same (yarn).
        truncate: whether the dimensions with that many turns are made whole numbers (yarn).
        mscale, mscale_all_dim: from which the attention factor follows where config.json does not say it; 0: from `factor`
            alone, as without them (yarn).
        attention_factor: by which the turned parts of queries and of keys are multiplied (yarn).
    """

    kind: str = "default"
    theta: float = 10000.0
    share: float = 1.0
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 1.0

    def arguments(self) -> dict[str, bool | int | float | str]:
        """`GPTModel`'s arguments; the frequencies of a scaling are set afterwards."""
        theta = int(self.theta) if float(self.theta).is_integer() else float(self.theta)
        return {"position_embedding_type": "rope", "rotary_percent": self.share, "rotary_base": theta}

    def softmax_scale(self, head_dim: int) -> dict[str, float]:
        """`TransformerConfig`'s argument that holds the attention factor; none where that is 1.

        Where all dimensions of a head turn, queries and keys that are multiplied by it give products that are multiplied by
        its square. Transformer Engine's fused rotary embedding of packed sequences would leave the factor out.
        """
        factor = self.attention_factor
        return {} if factor == 1 else {"softmax_scale": factor**2 / math.sqrt(head_dim)}


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention factor of a scaling (https://arxiv.org/abs/2309.00071, equation 22), its logarithm times `mscale`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(fields: Fields, max_positions: int, share: float | None = None) -> Rope:
    """The rotary embedding that `rope_scaling` and `rope_theta`, or `rope_parameters`, describe.

    A dynamic scaling is none here: up to max_position_embeddings, which no sequence exceeds, transformers and vLLM compute
    the default.

    Args:
        max_positions: max_position_embeddings.
        share: of a head's dimensions that turn where config.json has no `partial_rotary_factor`. None: the family turns
            whole heads, and any other share is refused.

    Raises:
        ValueError: a field has no meaning for this scaling, or transformers and vLLM would compute different things.
    """
    reader = _Reader(fields)
    kind = reader.kind()
    theta = reader.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1:
        fields.refuse(f"{reader.where}.rope_theta", theta, "it must be greater than 1")
    turning = reader.number("partial_rotary_factor", fields.number("partial_rotary_factor", share or 1.0))
    if turning != 1 if share is None else turning > 1:
        fields.refuse("partial_rotary_factor", turning, f"only {'1.0 is' if share is None else 'shares are'} supported")
    rope = Rope(theta=theta, share=turning)
    if kind != "default":
        rope = replace(rope, factor=reader.number("factor"))
    if kind == "linear":
        rope = replace(rope, kind=kind)
    if kind in ("llama3", "yarn"):
        # transformers prefers the field beside the section, as some files have it.
        original = fields.integer(_ORIGINAL, reader.integer(_ORIGINAL, max_positions))
        if original > _MOST_POSITIONS:
            raise ValueError(f"config.json: `{_ORIGINAL}` is too large, at most {_MOST_POSITIONS:,}")
        rope = replace(rope, kind=kind, original=original)
        rope = reader.llama3(rope) if kind == "llama3" else reader.yarn(rope, max_positions)
    reader.finish(kind)
    return rope


def scaled(hf_config: HFConfig, scaling: Mapping[str, JSON]) -> HFConfig:
    """A config.json that lacks a scaling, with this one: longer sequences, up to `factor` times the original length.

    Args:
        scaling: `rope_type`, `factor`, `original_max_position_embeddings` and others, by config.json's names.

    Raises:
        ValueError: config.json has another scaling or positions that contradict it; one with the same is returned unchanged.
    """
    if apart := sorted({"text_config", "vision_config"} & hf_config.keys()):
        raise ValueError(f"a model whose config.json has the section `{apart[0]}` cannot be given one yet")
    section = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    fields, current = Fields(hf_config, "any"), Fields(hf_config, "any").section(section)
    positions, original = fields.integer("max_position_embeddings"), scaling[_ORIGINAL]
    longest = int(float(str(scaling["factor"])) * int(str(original)))
    kind = current.pop("rope_type", current.pop("type", "default"))
    kept = {name: value for name, value in current.items() if kind == "default" or name in _UNSCALED}
    changed = {**hf_config, section: {**kept, **scaling}, "max_position_embeddings": longest}
    rope = read_rope(Fields(changed, "any"), longest, share=1.0)
    if kind != "default":
        if read_rope(fields, positions, share=1.0) == rope and positions == longest:
            return hf_config
        raise ValueError(f"config.json has a scaling of its own, `{section}` = {hf_config[section]}; remove the key")
    if not int(str(original)) <= positions < longest:
        raise ValueError(
            f"{_ORIGINAL} = {original} times factor = {scaling['factor']} must exceed the model's "
            f"max_position_embeddings = {positions}, which {original} must not"
        )
    return changed


class _Reader:
    """Takes the fields of the section of config.json that describes the rotary embedding."""

    def __init__(self, fields: Fields) -> None:
        legacy, current = fields.section("rope_scaling"), fields.section("rope_parameters")
        self.fields = fields
        self.where, self._section = ("rope_scaling", legacy) if legacy else ("rope_parameters", current)

    def kind(self) -> str:
        legacy = self._section.pop("type", "default")
        kind = self._section.pop("rope_type", legacy)
        if kind not in _SCALINGS:
            why = f"supported are {', '.join(_SCALINGS[:-1])} and {_SCALINGS[-1]}"
            if kind == "longrope":
                why += "; longrope's frequencies follow each sequence's length in transformers, the longest's in vLLM"
            self.fields.refuse(f"{self.where}.rope_type", kind, why)
        return str(kind)

    def number(self, name: str, default: float | None = None, or_zero: bool = False) -> float:
        """A positive number, or zero too. Without a default the field is required."""
        value: JSON = self._section.pop(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (0 < value < 1e30 or (or_zero and not value))
        ):
            raise ValueError(f"config.json: `{self.where}.{name}` = {value!r}, expected a positive number")
        return value

    def integer(self, name: str, default: int) -> int:
        value = self._section.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: `{self.where}.{name}` = {value!r}, expected a positive integer")
        return value

    def llama3(self, rope: Rope) -> Rope:
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        if low >= high:
            self.fields.refuse(f"{self.where}.low_freq_factor", low, f"it must be below high_freq_factor = {high}")
        return replace(rope, low=low, high=high)

    def yarn(self, rope: Rope, max_positions: int) -> Rope:
        slow, fast = self.number("beta_slow", 1.0), self.number("beta_fast", 32.0)
        if slow > fast:  # Kimi-K2 has 1 for both: a step from kept to divided
            self.fields.refuse(f"{self.where}.beta_slow", slow, f"it must be at most beta_fast = {fast}")
        if max_positions > rope.original * rope.factor:
            why = f"it stretches {rope.original} positions to fewer than max_position_embeddings = {max_positions}"
            self.fields.refuse(f"{self.where}.factor", rope.factor, f"{why}, where vLLM's table ends")
        truncate = self._section.pop("truncate", True)
        if not isinstance(truncate, bool):
            raise ValueError(f"config.json: `{self.where}.truncate` = {truncate!r}, expected true or false")
        mscale, all_dim = self.number("mscale", 0.0, or_zero=True), self.number("mscale_all_dim", 0.0, or_zero=True)
        scale = yarn_mscale(rope.factor)
        if mscale and all_dim:
            scale = yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, all_dim)
        scale = self.number("attention_factor", scale)
        if scale != 1 and rope.share < 1:
            self.fields.refuse(
                f"{self.where}.attention_factor", scale, "only 1.0 is supported where a part of a head turns"
            )
        return replace(
            rope,
            beta_slow=slow,
            beta_fast=fast,
            truncate=truncate,
            mscale=mscale,
            mscale_all_dim=all_dim,
            attention_factor=scale,
        )

    def finish(self, kind: str) -> None:
        for name, value in self._section.items():
            self.fields.refuse(f"{self.where}.{name}", value, f"not known for rope type {kind}")
