"""Whether the model of a recipe exists and can be cut the way the recipe cuts it, read from its config.json."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.base.messages import show
from megatron_rl.base.plugins import read_text
from megatron_rl.base.shipped import missing
from megatron_rl.config.actor import ParallelConfig
from megatron_rl.config.actor_checks import check_actor_model, check_adapter
from megatron_rl.config.evaluation_checks import runs_harness
from megatron_rl.config.exact_checks import check_exact
from megatron_rl.config.model import CreateModelConfig, CreateVisionConfig
from megatron_rl.config.pipeline_split import chunk_layers, stage_layers
from megatron_rl.config.published import published_config
from megatron_rl.config.rollout_checks import check_rollout_model
from megatron_rl.config.schema import Config
from megatron_rl.config.validate import problems
from megatron_rl.models import HFConfig, Model, model_of, read_hf_config
from megatron_rl.models.classifier import is_classifier
from megatron_rl.models.gated_delta import GatedDelta
from megatron_rl.models.hf_config import stored_hf_config
from megatron_rl.models.lora import check_lora
from megatron_rl.models.multi_latent import MultiLatent
from megatron_rl.models.registry import created_config, created_words
from megatron_rl.models.rules import shard_shape

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
CPU_GATED_DELTA_SIZES = (64, 128)  # heads that vLLM 0.32's chunk_gated_delta_rule_cpu takes
CPU_LATENTS = (512, 64)  # of `vllm.v1.attention.backends.mla.cpu_mla`: the latent, and what turns with the position
# vLLM 0.32, CPUAttentionBackend.get_supported_head_sizes
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_MOST_PARAMETERS = 100_000_000_000
_MOST_BYTES, _MOST_INDEX_BYTES = 2**26, 2**30  # of a config.json, of the list of weights


def check_model(config: Config, model: HFConfig | None = None, command: str = "train") -> Iterator[str]:
    """Yields a sentence per problem with `model`, its sizes, and the layouts of actor and engine on it.

    Args:
        model: the model's config.json; None: it is read from `model.path`. A served model may be of an unsupported family:
            then only the length of its sequences is checked.
        command: only `reward-model` takes the folder of a reward model.
    """
    if model is not None:
        try:
            model = config.model.completed(model)
        except ValueError as error:
            yield str(error)
            return
        try:
            described = model_of(model)
        except ValueError:  # `plan`, which needs a family, refuses it with the reason
            positions = model.get("max_position_embeddings")
            yield from _check_length(config, positions, command) if isinstance(positions, int) else ()
        else:
            yield from _check_layout(config, described, command)
    elif config.model.path is not None:
        folder = Path(config.model.path)
        try:
            known = None if folder.exists() else published_config(folder.name)
        except OSError as error:  # a name that is too long, a folder above it that may not be searched
            yield f"`model.path` {show(str(folder))}: {error.strerror}"
            return
        if known is not None:
            yield f"`model.path`: {folder} {_not_there(folder)}; the other checks used the published sizes of {folder.name}"
            yield from _check_sizes(config, known, command)
            return
        problems = list(_check_folder(folder))
        yield from problems
        if not problems:
            yield from _check_template(config, folder, command)
            yield from _check_stored(config, folder, command)
    elif config.model.create is not None:
        problems = list(check_create(config.model.create))
        yield from problems
        if not problems:
            yield from _check_sizes(config, created_config(config.model.create), command)
    else:
        yield "`model` names no model: set `model.path` to a Hugging Face folder, or `model.create` to make a small one"


def _check_stored(config: Config, folder: Path, command: str) -> Iterator[str]:
    try:
        hf_config = read_hf_config(folder)
    except ValueError as error:
        yield str(error)
        return
    yield from _check_sizes(config, hf_config, command)
    lora = config.actor.lora
    if lora is not None and lora.sync == "adapters" and hf_config != stored_hf_config(folder):
        yield (
            f"`actor.lora.sync=adapters`: the engine would read {folder}, of which only a part is read; set it to merged"
        )


def _check_template(config: Config, folder: Path, command: str) -> Iterator[str]:
    """Yields a sentence where a task asks for a chat template that the tokenizer's folder does not have."""
    tasks = {f"eval.{name}": task for name, task in config.tasks.eval.items()}
    if command != "evaluate":
        tasks |= {f"train.{name}": task for name, task in config.tasks.train.items()}
    wanting = [f"tasks.{key}.chat" for key, task in tasks.items() if task.chat and task.chat_template is None]
    if not wanting or any((folder / name).exists() for name in _TEMPLATES):
        return
    try:
        settings = json.loads(read_text(folder / "tokenizer_config.json", _MOST_BYTES))
    except (ValueError, RecursionError, OSError):  # absent, or for transformers to refuse
        settings = {}
    if not (isinstance(settings, dict) and settings.get("chat_template")):
        yield (
            f"`{wanting[0]}` applies the tokenizer's chat template, and {folder} has none (chat_template.jinja, or the key "
            "chat_template in tokenizer_config.json); add one, or set chat to false and write the prompt in `prompt`"
        )


def check_cpu_engine(config: Config) -> Iterator[str]:
    """Yields a sentence where vLLM has no attention kernel for the (checked) recipe's model on a CPU."""
    if config.model.create is not None:
        key, hf_config = "`model.create.head_dim`", created_config(config.model.create)
    else:
        assert config.model.path is not None  # checked by `check_model`
        key, hf_config = "the model's head_dim", read_hf_config(config.model.path)
    model = model_of(hf_config)
    attention, size = model.attention, model.attention.head_width
    if isinstance(attention, GatedDelta):
        yield from _check_cpu_gated_delta(attention, config.model.dtype)
    if isinstance(attention, MultiLatent):
        if (sizes := (attention.kv_rank, attention.rope)) != CPU_LATENTS:
            yield (
                f"vLLM's latent attention on a CPU reads latents of {' + '.join(map(str, CPU_LATENTS))} numbers, and the "
                f"model's have {' + '.join(map(str, sizes))}: kv_lora_rank and qk_rope_head_dim in its config.json"
            )
        # `RotaryEmbedding.forward_cpu` takes queries of three dimensions for those of one head.
        if model.description.rope.kind == "default":
            yield (
                "vLLM's rotary embedding on a CPU turns one head of latent attention alone where rope_parameters in its "
                "config.json is of type default; with yarn it turns all"
            )
    elif size not in CPU_HEAD_SIZES:
        yield (
            f"{key} ({size}) is none of the sizes that vLLM's attention has on a CPU: "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}"
        )


def _check_cpu_gated_delta(attention: GatedDelta, dtype: str) -> Iterator[str]:
    if dtype != "bfloat16":
        yield f"`model.dtype={dtype}`: vLLM's gated-delta layers compute in bfloat16 only on a CPU; set it to that"
    if attention.key_dim != attention.value_dim or attention.key_dim not in CPU_GATED_DELTA_SIZES:
        yield (
            f"the model's linear_key_head_dim ({attention.key_dim}) and linear_value_head_dim ({attention.value_dim}) must "
            f"both be one of {', '.join(map(str, CPU_GATED_DELTA_SIZES))}, the sizes that vLLM has on a CPU"
        )


def _check_folder(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"`model.path`: {folder} {'is not a folder' if folder.exists() else _not_there(folder)}"
        return
    try:
        config = json.loads(read_text(folder / "config.json", _MOST_BYTES))
        if not isinstance(config, dict):
            yield f"`model.path`: {folder / 'config.json'} does not hold a JSON object"
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


def _not_there(folder: Path) -> str:
    """Says what is missing, in words after the folder's name. One of the form `owner/name` may be meant as a name on the
    hub."""
    words = f"does not exist{missing(folder)}"
    if folder.is_absolute() or len(folder.parts) != 2 or folder.parts[0] in (".", "..", "~", "runs", "models"):
        return words
    return (
        f"{words}; it must be a folder: `hf download {folder} --local-dir {folder.name}`, then model.path={folder.name}"
    )


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


def check_create(create: CreateModelConfig) -> Iterator[str]:
    """Yields a sentence per size out of range, and per character or word that the tokenizer cannot have."""
    if out_of_range := list(problems(create, "model.create")):
        yield from out_of_range
        return
    parameters = create.layers * create.hidden_size * (2 * create.heads * create.head_dim + 3 * create.ffn_size)
    parameters += 2 * create.vocab_size * create.hidden_size
    if parameters > _MOST_PARAMETERS:
        yield (
            f"`model.create` describes a model of about {parameters:,} parameters, which would be made at random on one "
            f"processor; at most {_MOST_PARAMETERS:,} are possible: make it smaller, or set `model.path`"
        )
    if create.heads % create.kv_heads:
        yield f"`model.create.heads` ({create.heads}) must be a multiple of `model.create.kv_heads` ({create.kv_heads})"
    if create.vision is not None:
        yield from _check_create_vision(create, create.vision)
    if create.head_dim % 2:
        yield f"`model.create.head_dim` ({create.head_dim}) must be even: rotary embeddings turn pairs"
    for key, names in (("characters", create.characters), ("words", create.words)):
        repeated = sorted(name for name, times in Counter(names).items() if times > 1)
        if repeated:
            yield f"`model.create.{key}` repeats {', '.join(map(repr, repeated))}"
    for word in create.words:
        if len(word) < 2:
            yield f"`model.create.words`: {word!r} is no word; characters belong in `model.create.characters`"
    special = 2 + len(created_words(create))
    tokens = len(create.characters) + len(create.words) + special
    if tokens > create.vocab_size:
        yield (
            f"`model.create.vocab_size` ({create.vocab_size}) must hold {len(create.characters)} characters, "
            f"{len(create.words)} words and {special} special tokens: make it at least {tokens}"
        )


def _check_create_vision(create: CreateModelConfig, vision: CreateVisionConfig) -> Iterator[str]:
    if create.heads * create.head_dim != create.hidden_size:
        yield (
            f"`model.create.head_dim` ({create.head_dim}) must be hidden_size / heads ({create.hidden_size} / "
            f"{create.heads}) in a model with `vision`"
        )
    if create.head_dim % 16:
        yield (
            f"`model.create.head_dim` ({create.head_dim}) must be a multiple of 16 with `vision`: three axes share its pairs"
        )
    if vision.hidden_size % (4 * vision.heads):
        yield (
            f"`model.create.vision.hidden_size` ({vision.hidden_size}) must be a multiple of 4 x `heads` "
            f"({vision.heads}): two axes turn pairs"
        )
    if vision.window % (2 * vision.patch):
        yield f"`model.create.vision.window` ({vision.window}) must be a multiple of 2 x `patch` ({vision.patch})"


def _check_sizes(config: Config, hf_config: HFConfig, command: str) -> Iterator[str]:
    try:
        hf_config = config.model.completed(hf_config)
    except ValueError as error:
        yield str(error)
        return
    if config.model.rope_scaling is not None and runs_harness(config, command):
        yield "`model.rope_scaling`: a harness asks a server of `model.path` as it is; name a run's export, which has it"
    try:
        model = model_of(hf_config)
    except ValueError as error:
        yield f"`model.path`: {error}"
    else:
        if is_classifier(model.family) and command != "reward-model":
            yield f"`model.path`: {config.model.path} is a reward model: it gives a score, and generates nothing"
        if model.description.vision is not None and command == "reward-model":
            yield "`megatron-rl reward-model` reads text only, and the model has a vision tower; take one without"
        yield from _check_layout(config, model, command)


def _check_layout(config: Config, model: Model, command: str) -> Iterator[str]:
    parallel, rollout, dims = config.actor.parallel, config.rollout, model.dims
    try:
        stage_layers(dims["layers"], parallel.pipeline, parallel.virtual_pipeline)
    except ValueError as error:
        keys = "`actor.parallel.pipeline`" + (" or `virtual_pipeline`" if parallel.virtual_pipeline > 1 else "")
        yield f"the model's {error}; lower {keys}"
    refused = list(model.attention.problems(parallel.tensor, "actor.parallel.tensor"))
    yield from refused or dict.fromkeys(uncuttable(model, parallel))
    if isinstance(model.attention, GatedDelta):
        yield from model.attention.context_problems(parallel.tensor, parallel.context)
    yield from model.attention.engine_problems(rollout.tensor_parallel, "rollout.tensor_parallel")
    experts = model.expert_count
    yield from check_rollout_model(rollout, model)
    yield from check_exact(config, model)
    if experts and parallel.tensor > 1 and not parallel.sequence:
        yield (
            f"Megatron-Core trains experts with tensor parallelism only where sequences are split too: set "
            f"actor.parallel.sequence=true, or `actor.parallel.tensor` ({parallel.tensor}) to 1"
        )
    if not experts:
        for name in ("expert", "expert_tensor"):
            if (value := getattr(parallel, name)) > 1:
                yield f"`actor.parallel.{name}` is {value}, but the model has no experts; set it to 1"
    elif experts % parallel.expert:
        yield f"the model's {experts} experts must be a multiple of `actor.parallel.expert` ({parallel.expert})"
    if model.description.transformer.get("softmax_type") == "learnable" and parallel.context > 1:
        yield (
            f"`actor.parallel.context` is {parallel.context}, and Transformer Engine passes no keys and values around where "
            "attention has sinks; set it to 1"
        )
    if model.experts is not None and model.experts.biases and parallel.expert_tensor > 1:
        yield (
            f"`actor.parallel.expert_tensor` is {parallel.expert_tensor}, and Megatron-Core does not cut experts that have "
            "biases; set it to 1, and cut by actor.parallel.expert"
        )
    yield from _check_vision(config, model)
    yield from check_actor_model(config, model)
    if config.actor.lora is not None:
        yield from check_lora(config.actor.lora, model)
    yield from check_adapter(config, model)
    yield from _check_length(config, model.description.max_positions, command)


def _check_vision(config: Config, model: Model) -> Iterator[str]:
    """Yields options that a vision tower rules out, and those that need one."""
    if model.description.vision is None:
        for name in ("min_pixels", "max_pixels"):
            if getattr(config.model, name) is not None:
                yield f"`model.{name}` is for models that read images, and this one does not; remove it"
        if config.actor.freeze_vision_tower:
            yield "`actor.freeze_vision_tower` is for models that read images, and this one does not; set it to false"
        tasks = {
            **{f"train.{name}": task for name, task in config.tasks.train.items()},
            **{f"eval.{name}": task for name, task in config.tasks.eval.items()},
        }
        for name, task in tasks.items():
            if task.columns.images is not None:
                yield (
                    f"`tasks.{name}.columns.images`: the model reads text only; remove it, or set model.path to a model "
                    "whose vision tower is read, which Qwen3.5's is not"
                )
        return
    if config.actor.parallel.context > 1:
        yield "`actor.parallel.context` cuts sequences, which a model with a vision tower does not support yet; set it to 1"
    parallel, fed = config.actor.parallel, model.description.vision.deepstack
    with contextlib.suppress(ValueError):  # layers that cannot be spread are refused by `_check_layout`
        first = chunk_layers(model.dims["layers"], parallel.pipeline, parallel.virtual_pipeline)[0][0]
        if first < fed:
            keys = "`actor.parallel.pipeline`" + (" or `virtual_pipeline`" if parallel.virtual_pipeline > 1 else "")
            yield (
                f"the vision tower feeds the model's first {fed} layers (deepstack_visual_indexes in its config.json), and "
                f"the first stage begins with {first}; lower {keys}"
            )
    for key, on in (
        ("actor.fp8", config.actor.fp8 is not None),
        ("rollout.fp8", config.rollout.fp8 != "none"),
    ):
        if on:
            yield f"`{key}` is not supported with a vision tower yet; leave it out"


def _check_length(config: Config, positions: int, command: str) -> Iterator[str]:
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    if longest > positions and not runs_harness(config, command):  # a harness is served all that the model takes
        remedy = f"; or {'raise model.create.max_positions' if config.model.create is not None else 'set model.rope_scaling'}"
        yield (
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_tokens {rollout.max_tokens} = "
            f"{longest} exceeds the model's {positions} positions; lower one of them{remedy}"
        )


def uncuttable(model: Model, parallel: ParallelConfig) -> Iterator[str]:
    """A sentence per parameter that does not divide over the ranks that share it."""
    for rule in model.parameters:
        key = "expert_tensor" if rule.per_expert else "tensor"
        try:
            shard_shape(rule, model.dims, getattr(parallel, key))
        except ValueError as error:
            yield f"the model's {error} (`actor.parallel.{key}`)"
