"""Published models that are read as the language model in them: a vision tower, and layers that predict further tokens, are
left out. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_rl.models.hf_config import INERT, JSON, HFConfig, stored_hf_config

# Architectures of the published files, and transformers' of the language model in them.
_TEXT_ONLY = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_TEXT, _ROPE = "text_config", ("rope_scaling", "rope_parameters")
# Fields of the tower, of the words for what it reads, and of the layers that predict further tokens.
_LEFT_OUT = frozenset((
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "language_model_only", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
))  # fmt: skip
_AXES = ("mrope_section", "mrope_interleaved")
_PREFIX = "model.language_model."  # before the decoder's names in such files, in place of `model.`
NOT_READ = ("model.visual.", "mtp.")  # before the names of what is left out


def read_hf_config(folder: str | Path) -> dict[str, JSON]:
    """`stored_hf_config`; of models that are read as text only, what `language_model` makes of it."""
    return language_model(stored_hf_config(folder))


def language_model(config: HFConfig) -> dict[str, JSON]:
    """The config.json of the language model by itself, as transformers writes it; any other model's as it is.

    Fields beside `text_config` stay, so that those which are not known are refused where the model is described.

    Raises:
        ValueError: there is no `text_config`, or it and what is beside it disagree.
    """
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str) or architecture not in _TEXT_ONLY:
        return dict(config)
    text = config.get(_TEXT)
    if not isinstance(text, dict):
        raise ValueError(f"config.json: `{_TEXT}` = {text!r}, expected an object with the language model")
    outer = {name: value for name, value in config.items() if name not in (*_LEFT_OUT, _TEXT, "model_type")}
    inner = {name: value for name, value in text.items() if name not in (*_LEFT_OUT, "architectures")}
    for name in outer.keys() & inner.keys():
        if name not in INERT and None not in (outer[name], inner[name]) and outer[name] != inner[name]:
            raise ValueError(
                f"config.json: `{name}` = {outer[name]!r}, but {inner[name]!r} in `{_TEXT}`; set both to what is right"
            )
    merged = {**inner, **{name: value for name, value in outer.items() if value is not None}}
    kind = f"{config.get('model_type')}_text"
    return without_axes({"model_type": kind, **merged, "architectures": [_TEXT_ONLY[architecture]]})


def without_axes(config: HFConfig) -> dict[str, JSON]:
    """A config.json without the axes of its rotary embedding: a token of text has one position on all of them."""
    return {
        name: {key: item for key, item in value.items() if key not in _AXES}
        if name in _ROPE and isinstance(value, dict)
        else value
        for name, value in config.items()
    }


def names_read(stored: Iterable[str]) -> dict[str, str]:
    """The tensors of the language model among those of files, by their names in its rules. The files of one by itself too.

    Raises:
        ValueError: two have one name.
    """
    names = dict[str, str]()
    for name in stored:
        alone = "model." + name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name
        if names.setdefault(alone, name) != name:
            raise ValueError(f"a folder has both {name} and {names[alone]}, of which one is to be {alone}")
    return {alone: name for alone, name in names.items() if not name.startswith(NOT_READ)}
