"""Steps without an engine: what is installed, Transformer Engine's layers against torch's, the actor against transformers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.build import DTYPES
from megatron_rl.actor.head import VocabShard, log_probs_from_hidden
from megatron_rl.config.machine import count_gpus
from megatron_rl.modules.layers import packed_attention
from megatron_rl.runtime import device, provenance
from megatron_rl.seams.megatron import MAIN_GRADIENT
from megatron_rl.seams.transformer_engine import UNFUSED, attention_kernels
from megatron_rl.selftest.bench import (
    SHAPE,
    Bench,
    Figures,
    Surprise,
    expect,
    scores,
    sequences,
    update,
    weights,
)
from megatron_rl.selftest.steps import HOPPER

# Mean difference of a log-prob that two right implementations have.
_ROUNDING = {"float32": 1e-5, "bfloat16": 0.03}


def versions(bench: Bench) -> Figures:
    figures: Figures = dict(provenance.versions())
    for name in ("megatron.core", "vllm", "transformer_engine.pytorch"):
        if name != "transformer_engine.pytorch" or device.has_transformer_engine():
            importlib.import_module(name)
    if not bench.gpu:
        if count_gpus():
            raise Surprise(f"{count_gpus()} GPUs are here, and torch {torch.__version__} can use none of them")
        return figures
    card = torch.cuda.get_device_properties(0)
    figures |= {"card": card.name, "GPUs": float(torch.cuda.device_count()), "memory GiB": card.total_memory / 2**30}
    figures |= {"capability": f"{card.major}.{card.minor}", "CUDA": str(torch.version.cuda)}
    figures |= {"cuDNN": str(torch.backends.cudnn.version()), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    figures["drivers"] = "; ".join(provenance.gpus())
    if device.has_transformer_engine():
        theirs = importlib.import_module("transformer_engine.pytorch").get_cudnn_version()
        if theirs != cudnn_version(torch.backends.cudnn.version()):
            raise Surprise(f"Transformer Engine has loaded cuDNN {theirs}, torch {torch.backends.cudnn.version()}")
    return figures


def cudnn_version(number: int | None) -> tuple[int, int, int] | None:
    """The version of cuDNN 9 that a number stands for: (9, 20, 0) for 92000."""
    return None if number is None else (number // 10_000, number // 100 % 100, number % 100)


def linear(bench: Bench) -> Figures:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    torch.manual_seed(0)
    layer = te.Linear(512, 256, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(256, 512, device=device.device(), dtype=torch.bfloat16)
    upstream = torch.randn(256, 256, device=device.device(), dtype=torch.bfloat16)
    recipes = {"bf16": None} | (
        {"FP8 blockwise": Float8BlockScaling()} if torch.cuda.get_device_capability() >= HOPPER else {}
    )
    figures: Figures = {}
    for name, recipe in recipes.items():
        leaf = x.clone().requires_grad_()
        layer.weight.grad = None
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            out = layer(leaf)
        out.backward(upstream)
        weight = layer.weight.detach().float()
        want = (x.float() @ weight.t(), upstream.float() @ weight, upstream.float().t() @ x.float())
        assert leaf.grad is not None
        assert layer.weight.grad is not None
        for part, got, right in zip(
            ("output", "input gradient", "weight gradient"), (out, leaf.grad, layer.weight.grad), want, strict=True
        ):
            error = float((got.detach().float() - right).norm() / right.norm())
            most = 0.01 if recipe is None else 0.08
            figures[f"{name} {part} error"] = expect(
                f"{name}: relative error of the {part}", error, most, "rounding makes"
            )
    return figures


def attention(bench: Bench) -> Figures:
    from transformer_engine.pytorch import DotProductAttention

    torch.manual_seed(0)
    lengths, heads, groups, size = (37, 129, 403), 8, 2, 64
    offsets = torch.tensor([0, *np.cumsum(lengths)], device=device.device())
    query, key, value = (
        torch.randn(sum(lengths), count, size, device=device.device(), dtype=torch.bfloat16)
        for count in (heads, groups, groups)
    )
    core = DotProductAttention(heads, size, num_gqa_groups=groups, attn_mask_type="padding_causal", qkv_format="thd")
    small, longest = offsets.int(), max(lengths)
    out = core(query, key, value, cu_seqlens_q=small, cu_seqlens_kv=small, max_seqlen_q=longest, max_seqlen_kv=longest)
    want = packed_attention(query.float(), key.float(), value.float(), offsets, longest, None).flatten(1)
    difference = float((out.float() - want).abs().max())
    figures: Figures = {"max difference": expect("the largest difference", difference, 0.03, "bf16 rounding makes")}
    figures["kernels"] = attention_kernels()
    if figures["kernels"] == UNFUSED and torch.cuda.get_device_capability() >= HOPPER:
        raise Surprise(
            "Transformer Engine attends without fused or flash attention: slow, and its memory grows with the square of the "
            "length"
        )
    return figures


def actor(bench: Bench) -> Figures:
    return compare_actors(bench, "dense", 0) | compare_actors(bench, "experts", 16)


def compare_actors(bench: Bench, kind: str, experts: int) -> Figures:
    folder = bench.model(SHAPE, experts)
    config, tokens = bench.recipe(folder, kind), sequences(SHAPE.vocab_size)
    figures: Figures = {}

    def record(what: str, value: float, at_most: float) -> None:
        figures[f"{kind}: {what}"] = expect(f"{kind}: {what}", value, at_most, "rounding makes")

    actor, most = bench.actor(config), _ROUNDING[bench.dtype]
    ours = scores(actor, tokens)
    theirs = _transformers_scores(folder, bench.dtype, tokens)
    record("mean difference from transformers", float((ours - theirs).abs().mean()), most)
    if not device.has_transformer_engine():
        return figures
    actor.start_optimizer(config.actor.optimizer, 10)
    before, norm, here = weights(actor), update(actor, tokens), weights(actor)
    with device.plain_layers():
        plain = bench.actor(config)
        record("mean difference from the plain layers", float((ours - scores(plain, tokens)).abs().mean()), most)
        plain.start_optimizer(config.actor.optimizer, 10)
        record("difference of the gradient norm, relative,", abs(norm / update(plain, tokens) - 1), 0.02)
        there = weights(plain)
    moved, want = (torch.cat([(new[name] - before[name]).flatten() for name in new]) for new in (here, there))
    record("1 - cosine of the updates", 1 - float(torch.cosine_similarity(moved, want, dim=0)), 0.1)
    return figures


def _transformers_scores(folder: Path, dtype: str, tokens: Sequence[np.ndarray]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], trust_remote_code=False).to(
        device.device()
    )
    log_probs = []
    with torch.no_grad():
        for ids in tokens:
            row = torch.as_tensor(ids, device=device.device())
            logits = model(row[None]).logits[0, :-1].float()
            log_probs.append(torch.log_softmax(logits, -1).gather(1, row[1:, None])[:, 0].cpu())
    return torch.cat(log_probs)


def fp8(bench: Bench) -> Figures:
    folder = bench.model(SHAPE)
    tokens = sequences(SHAPE.vocab_size)
    want = scores(bench.actor(bench.recipe(folder, "bf16")), tokens)
    figures: Figures = {}
    for recipe in ("blockwise", "tensorwise"):
        config = bench.recipe(folder, recipe, f"actor.fp8.recipe={recipe}")
        actor = bench.actor(config)
        difference = (scores(actor, tokens) - want).abs().mean().item()
        figures[f"{recipe} vs bf16"] = expect(
            f"{recipe}: the mean difference of a log-prob from bf16's", difference, 0.2, "FP8 makes"
        )
        actor.start_optimizer(config.actor.optimizer, 10)
        figures[f"{recipe} gradient norm"] = update(actor, tokens)  # raises where it is not finite
    return figures


def output_layer(bench: Bench) -> Figures:
    """Gradients of hidden states and output matrix, the latter added to an fp32 sum, against plain torch in float64."""
    torch.manual_seed(0)
    dtype = DTYPES[bench.dtype]
    hidden = torch.randn(384, 256, device=device.device()).to(dtype).requires_grad_()
    weight = (torch.randn(1024, 256, device=device.device()) * 0.05).to(dtype).requires_grad_()
    targets = torch.randint(1000, (384,), device=device.device())
    total = torch.ones(1024, 256, device=device.device())  # what other micro-batches have added
    setattr(weight, MAIN_GRADIENT, total)
    # Tiles smaller than either matrix, so that sums of several products are compared.
    log_probs, _ = log_probs_from_hidden(hidden, weight, targets, VocabShard(0, 1000, None), num_bytes=2**18)
    log_probs.sum().backward()
    want = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    logits = want[0] @ want[1][:1000].t()
    logits.log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    figures: Figures = {}
    assert hidden.grad is not None
    # The logits are rounded to bf16; what the sums add to that is what would show here.
    most = {"float32": 1e-5, "bfloat16": 0.01}[bench.dtype]
    for name, got, leaf in (("hidden states", hidden.grad, want[0]), ("weight", total - 1, want[1])):
        assert leaf.grad is not None
        error = float((got.double() - leaf.grad).norm() / leaf.grad.norm())
        figures[f"gradient of the {name}: error"] = expect(
            f"the relative error of the gradient of the {name}", error, most, "rounding makes"
        )
    return figures


def cpu_optimizer(bench: Bench) -> Figures:
    """Compares what three updates change, with the optimizer here and there."""
    folder, tokens = bench.model(SHAPE), sequences(SHAPE.vocab_size)
    moved = []
    for where in ("gpu", "cpu"):
        config = bench.recipe(folder, where, f"actor.optimizer.device={where}")
        own = bench.actor(config)
        own.start_optimizer(config.actor.optimizer, 10)
        before = weights(own)
        for _ in range(3):
            update(own, tokens)
        moved.append(torch.cat([(new - before[name]).flatten() for name, new in weights(own).items()]))
    apart = 1 - float(torch.cosine_similarity(moved[0].double(), moved[1].double(), dim=0))
    most = 0.01 if bench.gpu else 1e-5  # weights in bf16, whose roundings a last bit of fp32 changes
    expect("1 - cosine of what the two optimizers change", apart, most, "rounding makes")
    return {"1 - cosine of the updates": apart}
