"""Whether the adapters that a recipe begins with are such as it trains, and of its model; by their adapter_config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.models import Model
from megatron_rl.models.lora import targets_of
from megatron_rl.user_files import read_text

_ABOUT = "adapter_config.json"
_MOST_BYTES, _SAMPLE = 2**24, 2**16
# What PEFT's adapters may have beside two plain matrices; where it is none of these, they do not.
_BEYOND = (
    *("use_dora", "use_rslora", "bias", "lora_bias", "fan_in_fan_out", "modules_to_save", "target_parameters"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules"),
)
_WITHOUT: tuple[object, ...] = (None, False, "none", [], {})


def check_adapter(config: Config, model: Model) -> Iterator[str]:
    """Yields a sentence per reason why the adapters in `actor.lora.path` are not those of this recipe.

    Their tensors' names and shapes are compared when they are loaded.
    """
    lora, kl = config.actor.lora, config.algorithm.kl
    if not lora.rank or lora.path is None:
        return
    if config.model.path is None:
        yield "`actor.lora.path` has adapters of a model that exists; set `model.path` to it instead of `model.create`"
        return
    if kl.coef or kl.reward_coef:
        yield (
            "`actor.lora.path` begins with trained adapters, and the reference policy of `algorithm.kl` is the model without "
            "any; set model.path to their run's export, with actor.lora.path=null"
        )
    file = Path(lora.path) / _ABOUT
    try:
        about = json.loads(read_text(file, _MOST_BYTES))
    except FileNotFoundError:
        yield f"`actor.lora.path`: {lora.path} has no {_ABOUT}; it must be a PEFT folder, as a run's adapter/ is"
        return
    except (ValueError, RecursionError, OSError) as error:
        yield f"`actor.lora.path`: {file} cannot be read: {error}"
        return
    if not isinstance(about, dict) or about.get("peft_type") != "LORA":
        yield f"`actor.lora.path`: {file} does not describe LoRA's adapters"
        return
    for name in _BEYOND:
        if about.get(name) not in _WITHOUT:
            yield f"`actor.lora.path`: {file} has {name} = {about[name]!r}; adapters here are two matrices, and nothing else"
    for key, own, theirs in (
        ("rank", lora.rank, about.get("r")),
        ("alpha", lora.scale * lora.rank, about.get("lora_alpha")),
    ):
        if own != theirs:
            yield f"`actor.lora.{key}` is {own:g}, and that of the adapters in {lora.path} is {theirs}; set it to theirs"
    modules = about.get("target_modules")
    if isinstance(modules, list) and set(modules) != set(wanted := targets_of(lora, model)):
        yield (
            f"`actor.lora.targets` are {', '.join(wanted)}, and those of the adapters in {lora.path} are "
            f"{', '.join(sorted(map(str, modules)))}; set them alike"
        )
    base = about.get("base_model_name_or_path")
    if isinstance(base, str) and not _is_same_model(Path(base), Path(config.model.path)):
        yield (
            f"`actor.lora.path`: the adapters in {lora.path} belong to {base}, which is not the model in "
            f"{config.model.path}; set model.path to theirs (or, where it is the same under another name, "
            f"base_model_name_or_path in {_ABOUT})"
        )


def _is_same_model(theirs: Path, own: Path) -> bool:
    """By the weights' sizes and ends, or, where the adapters' model is not on this machine, by the folders' names."""
    return _looks(theirs) == _looks(own) if theirs.is_dir() else theirs.name == own.name


def _looks(folder: Path) -> list[tuple[str, int, bytes]]:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            begin, size = file.read(_SAMPLE), os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _SAMPLE))
            found.append((path.name, size, begin + file.read()))
    return found
