"""Whether the model of a recipe exists and can be cut the way the recipe cuts it, read from its config.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.published import published_config
from megatron_rl.config.schema import Config, CreateModelConfig
from megatron_rl.config.shape import show
from megatron_rl.config.stages import stage_layers
from megatron_rl.user_files import read_text

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
# vLLM 0.32, CPUAttentionBackend.get_supported_head_sizes
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_MOST = {  # of a model that is made; those of the largest ones known, times ten and more
    "layers": 10_000,
    "hidden_size": 1_000_000,
    "heads": 100_000,
    "kv_heads": 100_000,
    "head_dim": 100_000,
    "ffn_size": 10_000_000,
    "vocab_size": 100_000_000,
    "max_positions": 1_000_000_000,
}
_MOST_PARAMETERS = 100_000_000_000
_MOST_BYTES, _MOST_INDEX_BYTES = 2**26, 2**30  # of a config.json, of the list of weights
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_model(config: Config, model: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yields a sentence per problem with `model`, its sizes, and the layouts of actor and engine on it.

    Args:
        model: the model's config.json, where its folder is not at hand; null: it is read from `model.path`.
    """
    if model is not None:
        yield from _check_sizes(config, model)
    elif config.model.path is not None:
        folder = Path(config.model.path)
        try:
            known = None if folder.exists() else published_config(folder.name)
        except OSError as error:  # a name that is too long, a folder above it that may not be searched
            yield f"`model.path` {show(str(folder))}: {error.strerror}"
            return
        if known is not None:
            yield f"`model.path`: {folder} does not exist; what else was checked holds for {folder.name} as it is published"
            yield from _check_sizes(config, known)
            return
        problems = list(_check_folder(folder))
        yield from problems
        if not problems:
            yield from _check_sizes(config, json.loads(read_text(folder / "config.json", _MOST_BYTES)))
    elif config.model.create is not None:
        problems = list(_check_create(config.model.create))
        yield from problems
        if not problems:
            yield from _check_sizes(config, _created_sizes(config.model.create))
    else:
        yield "`model` names no model: set `model.path` to a Hugging Face folder, or `model.create` to make a small one"


def check_cpu_engine(config: Config) -> Iterator[str]:
    """Yields a sentence where vLLM has no attention kernel for the (checked) recipe's model on a CPU."""
    if config.model.create is not None:
        key, size = "`model.create.head_dim`", config.model.create.head_dim
    else:
        assert config.model.path is not None  # `check_model` has seen to it
        model = json.loads((Path(config.model.path) / "config.json").read_text("utf-8"))
        key, size = "the model's head_dim", model.get("head_dim")
        heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
        if size is None and not str(model.get("model_type")).startswith("qwen3") and heads and hidden:
            size = hidden // heads
    if size is not None and size not in CPU_HEAD_SIZES:
        yield (
            f"{key} ({size}) is none of the sizes that vLLM's attention has on a CPU: "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}"
        )


def _check_folder(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"`model.path`: {folder} {'is not a folder' if folder.exists() else 'does not exist'}"
        return
    try:
        config = json.loads(read_text(folder / "config.json", _MOST_BYTES))
        if not isinstance(config, dict):
            yield f"`model.path`: {folder / 'config.json'} does not hold a JSON object"
        else:
            yield from _check_config(config, folder / "config.json")
    except FileNotFoundError:
        remedy = "it must be a Hugging Face model folder, or a checkpoint of a run (runs/<name>/checkpoints/step_<n>)"
        if (folder / ".metadata").is_file():
            remedy = f"convert it first: megatron-rl convert to-hf --megatron {folder} --hf DIR"
        yield f"`model.path`: {folder} has no config.json; {remedy}"
    except (ValueError, RecursionError, OSError) as error:
        yield f"`model.path`: {folder / 'config.json'} cannot be read: {error}"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        yield f"`model.path`: {folder} has no tokenizer ({', '.join(_TOKENIZERS)})"
    yield from _check_weights(folder)


def _check_config(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """The fields that are counted with below are whole numbers."""
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", *_EXPERT_KEYS)
    for name in (*names, "moe_intermediate_size", "max_position_embeddings"):
        value = config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            yield f"`model.path`: {path}: {name} must be a whole number; it is {show(value)}"


def _check_weights(folder: Path) -> Iterator[str]:
    if (folder / ".metadata").is_file():  # converted to Megatron's format
        return
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not any(folder.glob("*.safetensors")):
            yield f"`model.path`: {folder} has no *.safetensors files"
        return
    try:
        shards = sorted(set(json.loads(read_text(index, _MOST_INDEX_BYTES))["weight_map"].values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OSError) as error:
        yield f"`model.path`: {index} cannot be read: {error!r}"
        return
    if missing:
        yield f"`model.path`: {folder} lacks {len(missing)} of {len(shards)} weight files, first {missing[0]}"


def _check_create(create: CreateModelConfig) -> Iterator[str]:
    for name, most in _MOST.items():
        if not 1 <= getattr(create, name) <= most:
            bound = f"at most {most:,}" if getattr(create, name) > most else "at least 1"
            yield f"`model.create.{name}` must be {bound}; it is {getattr(create, name):,}"
    parameters = create.layers * create.hidden_size * (2 * create.heads * create.head_dim + 3 * create.ffn_size)
    parameters += 2 * create.vocab_size * create.hidden_size
    if parameters > _MOST_PARAMETERS:
        yield (
            f"`model.create` describes a model of about {parameters:,} parameters, which would be made at random on one "
            f"processor; at most {_MOST_PARAMETERS:,} are possible: make it smaller, or set `model.path`"
        )
    if create.kv_heads >= 1 and create.heads % create.kv_heads:
        yield f"`model.create.heads` ({create.heads}) must be a multiple of `model.create.kv_heads` ({create.kv_heads})"
    if create.head_dim % 2:
        yield f"`model.create.head_dim` ({create.head_dim}) must be even: rotary embeddings turn pairs"
    if not 0 < create.init_std <= 100:
        bound = "at most 100" if create.init_std > 100 else "greater than 0"
        yield f"`model.create.init_std` must be {bound}; it is {create.init_std}"
    for key, names in (("characters", create.characters), ("words", create.words)):
        repeated = sorted(name for name, times in Counter(names).items() if times > 1)
        if repeated:
            yield f"`model.create.{key}` repeats {', '.join(map(repr, repeated))}"
    for word in create.words:
        if len(word) < 2:
            yield f"`model.create.words`: {word!r} is no word; characters belong in `model.create.characters`"
    tokens = len(create.characters) + len(create.words) + 2
    if tokens > create.vocab_size >= 1:
        yield (
            f"`model.create.vocab_size` ({create.vocab_size}) must hold {len(create.characters)} characters, "
            f"{len(create.words)} words and 2 special tokens: make it at least {tokens}"
        )


def _created_sizes(create: CreateModelConfig) -> dict[str, Any]:
    """The made model's sizes under the names of a config.json."""
    return {
        "num_hidden_layers": create.layers,
        "hidden_size": create.hidden_size,
        "num_attention_heads": create.heads,
        "num_key_value_heads": create.kv_heads,
        "intermediate_size": create.ffn_size,
        "max_position_embeddings": create.max_positions,
    }


def _check_sizes(config: Config, model: Mapping[str, Any]) -> Iterator[str]:
    parallel, rollout = config.actor.parallel, config.rollout
    layers = model.get("num_hidden_layers")
    if layers is not None:
        try:
            stage_layers(layers, parallel.pipeline, parallel.virtual_pipeline)
        except ValueError as error:
            keys = "`actor.parallel.pipeline`" + (" or `virtual_pipeline`" if parallel.virtual_pipeline > 1 else "")
            yield f"the model's {error}; lower {keys}"
    heads = model.get("num_attention_heads")
    kv_heads = model.get("num_key_value_heads") or heads
    sizes = {"attention heads": heads, "key/value heads": kv_heads, "feed-forward size": model.get("intermediate_size")}
    experts = next((model[key] for key in _EXPERT_KEYS if model.get(key)), None)
    for what, size in sizes.items():
        if size is not None and size % parallel.tensor:
            yield f"the model's {what} ({size}) must be a multiple of `actor.parallel.tensor` ({parallel.tensor})"
    expert_ffn = model.get("moe_intermediate_size") if experts is not None else None
    if expert_ffn is not None and expert_ffn % parallel.expert_tensor:
        yield (
            f"the model's experts' feed-forward size ({expert_ffn}) must be a multiple of "
            f"`actor.parallel.expert_tensor` ({parallel.expert_tensor})"
        )
    if heads is not None and heads % rollout.tensor_parallel:
        yield (
            f"the model's attention heads ({heads}) must be a multiple of `rollout.tensor_parallel` "
            f"({rollout.tensor_parallel})"
        )
    elif kv_heads is not None and kv_heads % rollout.tensor_parallel and rollout.tensor_parallel % kv_heads:
        yield (
            f"`rollout.tensor_parallel` ({rollout.tensor_parallel}) must divide the model's {kv_heads} key/value "
            "heads, or be a multiple of them"
        )
    if experts is not None and parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"Megatron-Core trains experts with tensor parallelism only where sequences are split too: set "
            f"actor.parallel.sequence=true, or `actor.parallel.tensor` ({parallel.tensor}) to 1"
        )
    if experts is None:
        for name in ("expert", "expert_tensor"):
            if (value := getattr(parallel, name)) > 1:
                yield f"`actor.parallel.{name}` is {value}, but the model has no experts; set it to 1"
    elif experts % parallel.expert:
        yield f"the model's {experts} experts must be a multiple of `actor.parallel.expert` ({parallel.expert})"
    top_k = model.get("num_experts_per_tok")
    if experts is not None and top_k is not None and top_k > experts:
        yield f"`model.path`: config.json has num_experts_per_tok = {top_k}, but {experts} experts"
    positions = model.get("max_position_embeddings")
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    if positions is not None and longest > positions:
        remedy = "; or raise model.create.max_positions" if config.model.create is not None else ""
        yield (
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_tokens {rollout.max_tokens} = "
            f"{longest} exceeds the model's {positions} positions; lower one of them{remedy}"
        )
