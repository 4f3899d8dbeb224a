"""Reading a Hugging Face config.json so that nothing in it is silently ignored."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from megatron_rl.base.block_fp8 import BLOCK

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
HFConfig = Mapping[str, JSON]  # config.json as it was read

# Fields that say nothing about the forward pass of a decoder-only language model: names and versions, the weights' dtype,
# which words begin and end a text, what a call returns (`output_router_logits` with the loss of `router_aux_loss_coef`, which
# no rollout has), from what weights were drawn, defaults of generation and of classifiers. A recipe says each of them itself.
# fmt: off
INERT = frozenset((
    "_attn_implementation_autoset", "_attn_implementation", "_name_or_path", "architectures", "auto_map",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "dtype",
    "eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "id2label", "initializer_range", "label2id",
    "max_length", "model_type", "name_or_path", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "prefix", "problem_type", "return_dict", "return_dict_in_generate", "router_aux_loss_coef",
    "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "unk_token_id",
    "unsloth_fixed", "unsloth_version", "use_cache",
))
# fmt: on
# `quantization_config` of weights that are read as bf16 (`weights.block_scaled`), and fields of it that files say themselves.
_BLOCK_FP8: HFConfig = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}
_SAID_BY_FILES = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "scale_fmt", "dequantize")


def with_dtype(hf_config: HFConfig, dtype: str) -> dict[str, JSON]:
    """Says that the weights beside it have this dtype, under the name that it has for that, and are not quantised."""
    return {**unquantised(hf_config), "torch_dtype" if "torch_dtype" in hf_config else "dtype": dtype}


def unquantised(hf_config: HFConfig) -> dict[str, JSON]:
    return {name: value for name, value in hf_config.items() if name != "quantization_config"}


def stored_hf_config(folder: str | Path) -> dict[str, JSON]:
    """config.json of a Hugging Face model folder, as a dict.

    Raises:
        ValueError: the folder or its config.json is missing or not a JSON object, or only Python files in the folder could
            load the model or its tokenizer.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        what = "is not a folder" if Path(folder).exists() else "does not exist"
        what = "has no config.json" if Path(folder).is_dir() else what
        raise ValueError(f"model folder {folder} {what}: it must be a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or no UTF-8, too
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected an object")
    _refuse_own_code(Path(folder), config)
    return config


def _refuse_own_code(folder: Path, config: Mapping[str, JSON]) -> None:
    """ValueError where transformers would need the folder's own Python files, which `auto_map` names."""
    about = {"config.json": config, "tokenizer_config.json": {}}
    with contextlib.suppress(OSError, ValueError):  # a tokenizer that cannot be read is met where it is loaded
        about["tokenizer_config.json"] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name, content in about.items():
        if not isinstance(content, dict) or not content.get("auto_map"):
            continue
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        kind = content.get("tokenizer_class") if name != "config.json" else None
        known = config.get("model_type") in CONFIG_MAPPING_NAMES if kind is None else hasattr(transformers, str(kind))
        if not known:
            what = (
                f"tokenizer_class {kind!r:.80}" if kind is not None else f"model_type {config.get('model_type')!r:.80}"
            )
            raise ValueError(
                f"{folder} needs Python files of its own, which are never run: {name} names them (auto_map), and "
                f"transformers does not know its {what}"
            )


class Fields:
    """Tracks which fields of a config.json were read; `finish` refuses the others."""

    def __init__(self, config: HFConfig, family: str) -> None:
        self._config = config
        self._family = family
        self._seen: set[str] = set(INERT)

    def get(self, name: str, default: JSON = None) -> JSON:
        """The field's value, `default` where it is absent or null."""
        self._seen.add(name)
        value = self._config.get(name)
        return default if value is None else value

    def absent(self, name: str) -> bool:
        return name not in self._config

    def integer(self, name: str, default: JSON = None) -> int:
        """A positive integer. Without a default the field is required."""
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"config.json has no `{name}`, which family `{self._family}` needs")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: `{name}` = {value!r}, expected a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        """A number from 0 on, which JSON's NaN and Infinity are not."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
            raise ValueError(f"config.json: `{name}` = {value!r:.80}, expected a number from 0 on")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: `{name}` = {value!r}, expected true or false")
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of names; None where it is absent or null."""
        value = self.get(name)
        if value is None:
            return None
        names = [item for item in value if isinstance(item, str)] if isinstance(value, list) else None
        if names != value:
            raise ValueError(f"config.json: `{name}` = {value!r}, expected a list of names")
        return names

    def section(self, name: str) -> dict[str, JSON]:
        """An object of further fields, without those that are null; {} where it is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"config.json: `{name}` = {value!r}, expected an object")
        return {key: item for key, item in value.items() if item is not None}

    def quantisation(self) -> None:
        """Refuse a `quantization_config` of anything but block-wise FP8, which is read as bf16."""
        section = self.section("quantization_config")
        if not section:
            return
        stated = {"fmt": "e4m3", "activation_scheme": "dynamic", **section}
        wrong = {name: stated.get(name) for name, value in _BLOCK_FP8.items() if stated.get(name) != value}
        known = (*_BLOCK_FP8, *_SAID_BY_FILES)
        wrong |= {name: value for name, value in section.items() if value and name not in known}
        for name, value in wrong.items():
            remedy = "of quantised weights block-wise FP8 is read, with " + ", ".join(
                f"{field} {expected}" for field, expected in _BLOCK_FP8.items()
            )
            self.refuse(f"quantization_config.{name}", value, f"{remedy}; take the folder of the unquantised model")

    def only(self, name: str, value: JSON) -> None:
        """Refuse every value but `value`, which is also what an absent or null field means."""
        found = self.get(name, value)
        if found != value:
            self.refuse(name, found, f"only {value!r} is supported")

    def refuse(self, name: str, value: object, why: str) -> None:
        raise ValueError(f"config.json: `{name}` = {value!r} changes the forward pass of `{self._family}`: {why}")

    def finish(self) -> None:
        """Refuse what was not read. A field that is off (null, false, empty) cannot matter and passes."""
        for name, value in self._config.items():
            if name not in self._seen and value not in (None, False, [], {}, ""):
                raise ValueError(
                    f"config.json: field `{name}` = {value!r} is not known to family `{self._family}`, nor is what "
                    "it does to the forward pass; remove it if the model does not depend on it"
                )
