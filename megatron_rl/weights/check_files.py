"""Whether a folder's tensors are those of the model that its config.json describes: names, shapes, dtypes. Needs no torch."""

from __future__ import annotations

import re

from megatron_rl.base.block_fp8 import DTYPE, SCALE
from megatron_rl.models.family import Model
from megatron_rl.models.rules import Rule
from megatron_rl.weights.files import WeightSource

_DTYPES = ("F32", "BF16", "F16", "F64")
# Buffers that old checkpoints carry; they follow from the config.
_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def check_names(files: WeightSource, model: Model) -> None:
    """Refuse a folder that lacks a tensor of the model or holds one that the model has no place for."""
    expected = {tensor.name for rule in model.weights() for tensor in rule.hf}
    found = {name for name in files.names() if not (_BUFFERS.fullmatch(name) or model.is_skipped(name))}
    if model.description.tied:
        found -= {tensor.name for tensor in model.family.output.hf}
    for problem, names in (("lacks", expected - found), ("holds unexpected", found - expected)):
        if names:
            first = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ValueError(f"{files.folder} {problem} {first}; {_fields_behind(names, model)}")


def _fields_behind(names: set[str], model: Model) -> str:
    dims, hints = model.dims, []
    layers = {
        int(match[1]) for name in names if (match := re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name))
    }
    experts = {int(match[1]) for name in names if (match := re.search(r"\.experts\.(\d+)\.", name))}
    if "lm_head.weight" in names:
        hints.append(f"tie_word_embeddings = {model.description.tied}")
    if layers and (max(layers) >= dims["layers"] or len(layers) < dims["layers"]):
        hints.append(f"num_hidden_layers = {dims['layers']}")
    if experts and (max(experts) >= model.expert_count or len(experts) < model.expert_count):
        hints.append(model.said_experts)
    return "config.json says " + " and ".join(hints or ["architectures and biases otherwise"])


def check_tied(files: WeightSource, model: Model) -> None:
    """Refuse an output layer in the file that is not the embedding where the config says it is."""
    if not model.description.tied or (output := model.family.output.hf[0].name) not in files.names():
        return
    import torch

    embedding = model.family.embedding.hf[0].name
    rows = files.shape(embedding)[0]
    same = files.shape(output) == files.shape(embedding) and all(
        torch.equal(files.read(embedding, 0, at, at + 4096), files.read(output, 0, at, at + 4096))
        for at in range(0, rows, 4096)
    )
    if not same:
        raise ValueError(
            f"config.json of {files.folder} says tie_word_embeddings = True, but {output} differs from {embedding}"
        )


def check_tensors(rule: Rule, files: WeightSource, model: Model) -> None:
    """Compare the file's shapes with the config's, and refuse dtypes that mean nothing without scales."""
    for tensor in rule.hf:
        dtype = files.dtype(tensor.name)
        if dtype not in _DTYPES:
            why = f"no {tensor.name}{SCALE} is beside it" if dtype == DTYPE else "weights quantised so are not read"
            raise ValueError(
                f"{tensor.name} in {files.file_of(tensor.name)} has dtype {dtype}, "
                f"expected one of {', '.join(_DTYPES)}: {why}"
            )
        found, expected = files.shape(tensor.name), tensor.sizes(model.dims)
        if found != expected:
            wrong = [s for s, a, b in zip(tensor.shape, found, expected, strict=False) if a != b] or list(tensor.shape)
            fields = ", ".join(map(model.said, wrong))
            raise ValueError(
                f"{tensor.name} in {files.file_of(tensor.name)} has shape {found}, "
                f"but config.json makes it {expected} ({fields})"
            )
