"""LoRA's adapters as a weight map of their own, derived from a family's. No torch.

Every targeted Hugging Face matrix W [out, in] has a pair, A [rank, in] and B [out, rank], also where Megatron-Core holds
several in one parameter, so pairs are those of PEFT one to one. A pair is cut over tensor-parallel ranks as W is: where
W's rows are, B's rows are and A is whole; where W's columns are, A's columns are and B is whole. Whatever moves, saves or
counts weights by rules does so with adapters too.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from megatron_rl.base.messages import did_you_mean
from megatron_rl.models.family import Family, Model, ModelDescription
from megatron_rl.models.hf_config import HFConfig
from megatron_rl.models.rules import HFTensor, Rule, Sharding

ALL = "all-linear"
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # largest ranks that an engine of vLLM's may be made for
MODULE = "lora"  # Megatron's linear layer has its adapters in a child module of this name
PEFT_PREFIX = "base_model.model."  # before the names of modules in PEFT's files


class LoRA(Protocol):
    """A recipe's adapters: the values of its `actor.lora`."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def targets(self) -> Sequence[str]: ...
    @property
    def experts(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    @property
    def sync(self) -> str: ...


def module_of(tensor: HFTensor) -> str:
    """The last part of a module's name, as targets are given: `q_proj`."""
    return tensor.name.split(".")[-2]


def targetable(model: Model, experts: bool) -> list[str]:
    """The modules of a model that may have adapters, in the order of the weight map."""
    return list(dict.fromkeys(module_of(tensor) for rule in _linear(model, experts) for tensor in rule.hf))


def targets_of(lora: LoRA, model: Model) -> list[str]:
    """The recipe's targets, `all-linear` written out."""
    every = targetable(model, lora.experts)
    return every if ALL in lora.targets else [name for name in every if name in lora.targets]


def check_lora(lora: LoRA, model: Model) -> Iterator[str]:
    """Yields a sentence per key of `actor.lora` that the model rules out."""
    every = targetable(model, lora.experts)
    for name in lora.targets:
        if name in targetable(model, experts=True) and name not in every:
            yield f"`actor.lora.targets` has {name}, which only the model's experts have; set actor.lora.experts=true"
        elif name != ALL and name not in every:
            nearest = did_you_mean(name, [ALL, *every])
            yield f"`actor.lora.targets` has {name!r}, and the model's linear layers are {', '.join(every)}{nearest}"
    if lora.experts and not model.experts:
        yield "`actor.lora.experts` is for experts, and the model has none; set it to false"
    if lora.experts and model.family.stacking is not None:
        yield (
            f"`actor.lora.experts` is for experts that files have one by one, and family `{model.family.name}` stacks them; "
            "set it to false"
        )
    targeted = targets_of(lora, model)
    smallest: dict[str, tuple[int, ...]] = {}  # dense layers, shared experts and experts have modules of one name
    for tensor in (tensor for rule in _linear(model, lora.experts) for tensor in rule.hf):
        found = smallest.setdefault(module_of(tensor), tensor.sizes(model.dims))
        smallest[module_of(tensor)] = min(found, tensor.sizes(model.dims), key=min)
    narrow = [name for name in targeted if lora.rank > min(smallest[name])]
    for name in narrow:
        rows, columns = smallest[name]
        others = ", ".join(other for other in targeted if other not in narrow)
        remedy = f", or set actor.lora.targets=[{others}]" if others else ""
        yield (
            f"`actor.lora.rank` ({lora.rank}) is larger than the model's {name}, {rows} x {columns}; make it at most "
            f"{min(rows, columns)}{remedy}"
        )
    if lora.sync == "adapters":
        yield from _check_engine(lora, model)


def _check_engine(lora: LoRA, model: Model) -> Iterator[str]:
    """Yields options that adapters in the engine rule out."""
    for what, applies in (
        ("a mixture of experts", model.experts),
        ("a model that reads images", model.description.vision),
        ("a model with gated-delta layers", any(rule.sections for rule in model.parameters)),
        (f"a rank above {ENGINE_RANKS[-1]}", lora.rank > ENGINE_RANKS[-1]),
    ):
        if applies:
            yield f"`actor.lora.sync=adapters` is not for {what}; set it to merged"


def engine_options(lora: LoRA, model: Model) -> dict[str, object]:
    """vLLM's options where it adds the adapters itself, to weights that it reads by itself."""
    return {
        "load_format": "auto",
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in ENGINE_RANKS if rank >= lora.rank),
        "lora_target_modules": targets_of(lora, model),
    }


def adapters_of(model: Model, lora: LoRA) -> Model:
    """The adapters of a recipe as a model of their own: rules named as PEFT names the tensors, and sizes with the `rank`."""
    wanted = targets_of(lora, model)
    rules = tuple(
        adapter
        for rule in _linear(model, lora.experts)
        for tensor in rule.hf
        if module_of(tensor) in wanted
        for adapter in pair(rule, tensor, model)
    )

    def describe(config: HFConfig) -> ModelDescription:
        return _ranked(model.family.describe(config), lora.rank)

    family = Family(f"LoRA of {model.family.name}", (), rules, describe, adapters=True, decoder=model.family.decoder)
    return Model(family, _ranked(model.description, lora.rank))


def pair(rule: Rule, tensor: HFTensor, model: Model) -> tuple[Rule, Rule]:
    """The rules of A and B beside one tensor of a linear layer's rule."""
    decoder = model.family.decoder
    rows, columns = tensor.shape
    by_columns, sections = rule.sharding is Sharding.ROW, rule.sections_of(rule.hf.index(tensor), model.dims)
    inner, outer = parameter_names(tensor)
    layer = rule.megatron[0].removesuffix("weight") + MODULE
    own = tensor.name.removeprefix(decoder).removeprefix("model.").removesuffix("weight")
    name = PEFT_PREFIX + decoder + own
    cut = Sharding.SECTIONS if len(sections) > 1 else Sharding.COLUMN
    if by_columns or not rule.is_cut:
        cut = Sharding.REPLICATED
    return (
        Rule(
            (f"{layer}.{inner}",),
            (HFTensor(f"{name}lora_A.weight", ("rank", columns)),),
            Sharding.ROW if by_columns else Sharding.REPLICATED,
            rule.place,
            layers=rule.layers,
        ),
        Rule(
            (f"{layer}.{outer}",),
            (HFTensor(f"{name}lora_B.weight", (rows, "rank")),),
            cut,
            rule.place,
            layers=rule.layers,
            sections=sections if cut is Sharding.SECTIONS else (),
        ),
    )


def parameter_names(tensor: HFTensor) -> tuple[str, str]:
    """Names of A and B, in the child module."""
    return f"{module_of(tensor)}_A", f"{module_of(tensor)}_B"


def matrix_of(name: str, names: Container[str]) -> str:
    """Which of the `names` in a model's files has the matrix that a tensor in PEFT's files is added to."""
    full = name.removeprefix(PEFT_PREFIX).rsplit(".", 2)[0] + ".weight"
    return full if full in names else "model." + full[full.index("layers.") :]


def peft_config(lora: LoRA, names: Iterable[str], base: str) -> dict[str, object]:
    """The content of adapter_config.json beside tensors of these names; `base`: the folder of the model they belong to.

    PEFT 0.21 takes the modules gate_proj, up_proj and down_proj of a model with experts for these, which transformers has
    in two tensors a layer, and leaves out dense layers and shared experts; as parameters it takes exactly what is named.
    """
    names = list(names)
    parameters = _parameters(names)
    listed = sorted({name.split(".")[-3] for name in names} - {parameter.split(".")[-2] for parameter in parameters})
    modules: str | list[str] = listed
    [decoder] = {name.removeprefix(PEFT_PREFIX).partition("layers.")[0] for name in names}
    if decoder != "model.":  # beside a vision tower, whose layers may have the same names
        modules = rf"{re.escape(decoder)}layers\..*\.({'|'.join(listed)})"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.rank if lora.alpha is None else lora.alpha,
        "target_modules": modules,
        **({"target_parameters": parameters} if parameters else {}),
        # PEFT drops no inputs of parameters, and refuses to load a file that says so.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "bias": "none",
        "inference_mode": True,
    }


def _parameters(names: Sequence[str]) -> list[str]:
    """Ends of the names of feed-forwards' matrices that have adapters beside experts that have none."""
    if any(".experts." in name for name in names) or not any(".shared_expert" in name for name in names):
        return []
    return sorted({".".join((*name.split(".")[-4:-2], "weight")) for name in names if ".mlp." in name})


def peft_modules(about: Mapping[str, object]) -> set[str] | None:
    """The modules that an adapter_config.json lists, those of which it lists the weight too; None: a pattern of names."""
    modules, parameters = about.get("target_modules") or [], about.get("target_parameters") or []
    if not isinstance(modules, list) or not isinstance(parameters, list):
        return None
    return {*map(str, modules), *(str(name).removesuffix(".weight").split(".")[-1] for name in parameters)}


def is_adapter(parameter: str) -> bool:
    """Whether a parameter of a Megatron module is an adapter's, by its name."""
    return f".{MODULE}." in parameter


def _linear(model: Model, experts: bool) -> list[Rule]:
    """The rules of matrices that tokens are multiplied with, without the output layer."""
    return [rule for rule in model.parameters if rule.is_projection and (experts or not rule.per_expert)]


def _ranked(description: ModelDescription, rank: int) -> ModelDescription:
    untied = {**description.model, "share_embeddings_and_output_weights": False}
    return replace(description, dims={**description.dims, "rank": rank}, model=untied)
