"""A small random Qwen3 or Qwen2.5-VL model with a character-level tokenizer, as a Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.model_checks import check_create
from megatron_rl.models.registry import created_config, created_words, model_of
from megatron_rl.models.text_only import read_hf_config
from megatron_rl.weights.files import save_tensors, whole_folder

PAD, EOS = "<pad>", "<eos>"
MADE_FROM = "made_from.json"  # in the folder: settings and seed that it was made from, and every file's checksum


def create_model(folder: str | Path, config: CreateModelConfig, seed: int) -> None:
    """Write a model folder, of Qwen3 or with `vision` of Qwen2.5-VL: config.json, float32 weights made from the seed,
    tokenizer, generation config, and settings of the image processor.

    Matrices, embedding and output layer are normal with standard deviation `init_std`, whatever the depth; norms are 1,
    biases 0.
    The tokenizer maps every word of `words` and every other character of `characters` to one token, after `<pad>` (0) and
    `<eos>` (1); where several words begin, the longest counts. It adds no token by itself. Rows up to `vocab_size` are named
    `<unused_i>`, so that every id decodes. `made_from.json` says what it was made from, for `differences`.

    Raises:
        ValueError: sizes that no Qwen3 model can have, or characters that do not fit the vocabulary.
    """
    if problems := list(check_create(config)):
        raise ValueError("\n".join(problems))
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as temporary:
        _write_config(temporary, config)
        write_tokenizer(temporary, config)
        save_tensors(temporary / "model.safetensors", random_weights(temporary, config.init_std, seed))
        origin = {"model.create": asdict(config), "seed": seed, "files": _digests(temporary)}
        (temporary / MADE_FROM).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


def differences(folder: Path, config: CreateModelConfig, seed: int) -> list[str]:
    """Says in what `folder` is not what `create_model` makes of these settings and this seed: keys and files by name."""
    try:
        made = json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
        before, files = _flat(made["model.create"], made["seed"]), dict(made["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{MADE_FROM} is missing or unreadable"]
    after = _flat(asdict(config), seed)
    changes = [
        f"{key} {before.get(key)!r} there and {after.get(key)!r} here"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    there = _digests(folder)
    return changes + [f"{name} changed" for name in sorted(files.keys() | there) if files.get(name) != there.get(name)]


def _flat(create: Mapping[str, object], seed: int) -> dict[str, object]:
    return {f"model.create.{key}": value for key, value in create.items()} | {"seed": seed}


def _digests(folder: Path) -> dict[str, str]:
    """Checksum of every file in the folder but `made_from.json`."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MADE_FROM)
    return {path.name: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in paths}


def _write_config(folder: Path, config: CreateModelConfig) -> None:
    AutoConfig.for_model(**created_config(config)).save_pretrained(folder)
    if config.vision is not None and (vision := model_of(read_hf_config(folder)).description.vision) is not None:
        module, name = vision.processor
        processor = getattr(import_module(module), name)
        processor(patch_size=config.vision.patch, min_pixels=(4 * config.vision.patch) ** 2).save_pretrained(folder)
    GenerationConfig(pad_token_id=0, eos_token_id=1).save_pretrained(folder)


def write_tokenizer(folder: Path, config: CreateModelConfig) -> None:
    words = [*config.words, *created_words(config)]
    tokens = [PAD, EOS, *config.characters, *words]
    tokens += [f"<unused_{number}>" for number in range(config.vocab_size - len(tokens))]
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = Split(Regex(_pieces(words)) if words else "", "isolated")
    tokenizer.decoder = Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=config.max_positions,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = config.chat_template
    made.save_pretrained(folder)


def _pieces(words: Sequence[str]) -> str:
    """A regular expression that cuts a text into words, the longest first, and single characters."""
    escaped = (re.sub(r"([^A-Za-z0-9_ ])", r"\\\1", word) for word in sorted(words, key=len, reverse=True))
    return "|".join([*escaped, r"[\s\S]"])


def random_weights(folder: Path, std: float, seed: int) -> dict[str, Tensor]:
    model = model_of(read_hf_config(folder))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for rule in model.weights():
        for tensor in rule.hf:
            shape = tensor.sizes(model.dims)
            if len(shape) > 1:
                weights[tensor.name] = torch.randn(shape, generator=generator) * std
            else:
                weights[tensor.name] = torch.zeros(shape) if tensor.name.endswith("bias") else torch.ones(shape)
    return weights
