"""Files that Megatron-LM and Megatron-Bridge read besides the tensors of a distributed checkpoint: folders and trackers,
Megatron-LM's arguments, Bridge's run_config.yaml.

Megatron-LM (core_v0.16) takes the folder `release` where its tracker says so: weights only, at iteration 0. Bridge (0.3)
saves a model without optimizer as iteration 0, with a state of the training beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.checkpoint.convert.layout import Layout, padded
from megatron_rl.checkpoint.convert.source import BRIDGE_TRACKER, TRACKER, SourceModel
from megatron_rl.models.attention import GroupedQuery
from megatron_rl.models.classifier import is_classifier
from megatron_rl.models.family import Model
from megatron_rl.models.rope import Rope

if TYPE_CHECKING:
    import torch

MEGATRON_LM, BRIDGE = "megatron-lm", "bridge"
FOLDERS = {None: "", MEGATRON_LM: "release", BRIDGE: "iter_0000000"}
_PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
_TOKENIZER = "megatron.bridge.training.tokenizers.config.TokenizerConfig"
# GPTModel's arguments -> Megatron-LM's.
_LM_NAMES = {
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "rope_scaling": "use_rope_scaling",
    "rope_scaling_factor": "rope_scaling_factor",
}
# What Megatron-Core's RotaryEmbedding has built in: low and high frequency factor, positions before the scaling.
_LLAMA3 = (1.0, 4.0, 8192)


def rope_arguments(rope: Rope) -> dict[str, bool | float]:
    """`GPTModel`'s arguments, which are those of both programs, for a scaling of the rotary embedding.

    Raises:
        ValueError: it has none for it.
    """
    if rope.kind == "linear":
        return {"seq_len_interpolation_factor": rope.factor}
    if rope.kind == "llama3" and (rope.low, rope.high, rope.original) == _LLAMA3:
        return {"rope_scaling": True, "rope_scaling_factor": rope.factor}
    if rope.kind != "default":
        raise ValueError(
            f"Megatron-LM and Megatron-Bridge have no arguments for this model's {rope.kind} scaling of its rotary "
            "embedding; leave out --for, and set the frequencies where the checkpoint is loaded"
        )
    return {}


def check(model: Model) -> None:
    """Refuses what these files cannot describe.

    Raises:
        ValueError: both programs would make another model than it from them.
    """
    description = model.description
    alike = model.is_uniform and isinstance(model.attention, GroupedQuery)
    if not alike or description.vision is not None or is_classifier(model.family):
        raise ValueError(
            "--for: Megatron-LM and Megatron-Bridge are told of language models whose layers are alike, with grouped-query "
            f"attention, and this one of family `{model.family.name}` is none; leave it out"
        )
    rope_arguments(description.rope)


def write_files(program: str | None, folder: Path, model: SourceModel, layout: Layout, dtype: str) -> None:
    """Files in the folder of the tensors; of them `common.pt` is what Megatron-Core's `load_common_state_dict` returns."""
    import yaml

    from megatron_rl.seams.torch_archive import saved

    state: dict[str, object] = {} if program is None else {"checkpoint_version": 3.0, "iteration": 0}
    if program == MEGATRON_LM:
        state["args"] = _arguments(model, layout, dtype)
    (folder / "common.pt").write_bytes(saved(state))
    if program == BRIDGE:
        (folder / "run_config.yaml").write_text(yaml.safe_dump(_run_config(model, layout, dtype)), encoding="utf-8")
        (folder / "train_state.pt").write_bytes(saved(_train_state()))


def write_trackers(program: str | None, root: Path) -> None:
    """Files above it, which name it."""
    if program == MEGATRON_LM:
        (root / TRACKER).write_text(FOLDERS[program])
    elif program == BRIDGE:
        from megatron_rl.seams.torch_archive import saved

        (root / BRIDGE_TRACKER).write_bytes(saved(_train_state()))


def how_to_load(program: str | None, target: Path, model: SourceModel) -> str | None:
    """A sentence with the options that load the result; Megatron-LM takes most of the model from the checkpoint, not all."""
    if program == BRIDGE:
        return f"Megatron-Bridge: load_megatron_model({str(target / FOLDERS[BRIDGE])!r})"
    if program is None:
        return None
    shape, gpt = model.description.transformer, rope_arguments(model.description.rope)
    options = [f"--norm-epsilon {shape['layernorm_epsilon']:g}"]
    options += ["--qk-layernorm"] if shape["qk_layernorm"] else []
    if gpt.get("rope_scaling"):
        options.append(f"--use-rope-scaling --rope-scaling-factor {gpt['rope_scaling_factor']:g}")
    if "seq_len_interpolation_factor" in gpt:
        options.append(f"--rotary-seq-len-interpolation-factor {gpt['seq_len_interpolation_factor']:g}")
    if model.experts:
        options.append(
            f"--moe-router-dtype {shape['moe_router_dtype']} "
            f"--moe-router-load-balancing-type {shape['moe_router_load_balancing_type']}"
        )
    return (
        f"Megatron-LM: --load {target} --use-checkpoint-args, and what it does not take from there: {' '.join(options)}"
    )


def _arguments(model: SourceModel, layout: Layout, dtype: str) -> argparse.Namespace:
    """Megatron-LM's arguments of the model (`--use-checkpoint-args` takes them, other loads compare some), as its parser
    names them."""
    import torch

    shape, gpt = model.description.transformer, model.description.model | rope_arguments(model.description.rope)
    named = {
        name: shape[name]
        for name in (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
            *(
                "normalization",
                "qk_layernorm",
                "add_bias_linear",
                "add_qkv_bias",
                "hidden_dropout",
                "attention_dropout",
            ),
        )
    }
    experts = {}
    if model.experts:
        experts = {name: value for name, value in shape.items() if name.startswith("moe_")}
        experts = {"moe_layer_freq": 1, **experts, "num_experts": model.experts.count, "moe_grouped_gemm": True}
    return argparse.Namespace(
        **named,
        **experts,
        **{theirs: gpt[ours] for ours, theirs in _LM_NAMES.items() if ours in gpt},
        group_query_attention=shape["num_query_groups"] != shape["num_attention_heads"],
        norm_epsilon=shape["layernorm_epsilon"],
        swiglu=True,
        squared_relu=False,
        apply_layernorm_1p=False,
        apply_query_key_layer_scaling=False,
        add_position_embedding=True,
        use_rotary_position_embeddings=True,
        rotary_interleaved=False,
        seq_length=gpt["max_sequence_length"],
        max_position_embeddings=gpt["max_sequence_length"],
        untie_embeddings_and_output_weights=not model.description.tied,
        make_vocab_size_divisible_by=1,
        padded_vocab_size=padded(model.dims, layout.tensor)["padded_vocab"],
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(model.folder.resolve()),
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        params_dtype=getattr(torch, dtype),
        data_parallel_random_init=False,
        ckpt_format="torch_dist",
        no_save_optim=True,
        no_save_rng=True,
        consumed_train_samples=0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        iteration=0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


def _run_config(model: SourceModel, layout: Layout, dtype: str) -> dict[str, object]:
    """Bridge's run_config.yaml as far as it describes the model; it fills in its defaults."""
    shape, source = dict(model.description.transformer), str(model.folder.resolve())
    gpt = model.description.model | rope_arguments(model.description.rope)
    activation = shape.pop("activation_func")
    length = gpt.pop("max_sequence_length")
    provider = {
        "_target_": _PROVIDER,
        **shape,
        **gpt,
        "activation_func": {"_target_": f"torch.nn.functional.{activation}", "_call_": False},
        "should_pad_vocab": True,  # to the tensor parallelism that it is loaded at
        "make_vocab_size_divisible_by": 1,
        "seq_length": length,
        "hf_model_id": source,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "params_dtype": {"_target_": f"torch.{dtype}", "_call_": False},
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }
    if model.experts:
        provider["moe_grouped_gemm"] = True
    return {
        "model": provider,
        "checkpoint": {
            "save_optim": False,
            "save_rng": False,
            "fully_parallel_save": True,
            "ckpt_format": "torch_dist",
        },
        "tokenizer": {"_target_": _TOKENIZER, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": source},
    }


def _train_state() -> dict[str, torch.Tensor]:
    """Bridge's state of a training that has not begun."""
    import torch

    counts = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    return {
        **{name: torch.tensor(0, dtype=torch.int32) for name in counts},
        "floating_point_operations_so_far": torch.tensor(0.0, dtype=torch.float64),
        **{name: torch.tensor(False) for name in ("do_train", "do_valid", "do_test")},
    }
