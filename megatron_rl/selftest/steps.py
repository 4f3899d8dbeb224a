"""The steps, in their order; what each needs, and what is most likely wrong where it fails. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal["", "GPU", "Transformer Engine", "FP8"]  # FP8: blockwise, on Hopper


HOPPER = (9, 0)  # compute capability


@dataclass(frozen=True)
class SelfTestStep:
    """One question, answered by processes of its own, so that what breaks in one step does not spoil the next."""

    name: str
    function: str  # module of this package, and the function in it
    question: str
    cause: str  # the likely one, and what to do
    need: Need = ""
    overrides: tuple[str, ...] = ()  # of the step's recipe
    processes: int = 1  # tensor-parallel ranks of actor and engine; on a node with GPUs, one each
    minutes: float = 15.0  # after which it counts as hung; a node's first run compiles kernels in most steps
    asked: bool = False  # it shows a difference and judges nothing: run where it is asked for only


_SLEEP = (
    "the engine's memory after sleep and reload: a tensor that is named as held wrongly is one that vLLM's reload does not "
    "fill (rollout/engine.py, docs/mismatch.md); CUDA_LAUNCH_BLOCKING=1 shows where a kernel fails; answers that are drawn "
    "otherwise than scored: the CUDA graphs of decoding, which read memory that sleep has moved"
)
_EXACT = (
    "an operation that one side computes by another kernel: compare seams/vllm_exact.py with modules/exact_layers.py, on a "
    "GPU seams/vllm_invariant.py; rollout.exact=false until then"
)
_SPEED = "out of memory: another process holds the card, or the card has less than 80 GB; else the option's own kernels"
_APART = "a module that vLLM or Megatron-Core has named otherwise since (selftest/mismatch.py)"
# Of the actor, each measured against the step `speed`.
_OPTIONS: dict[str, tuple[Need, tuple[str, ...]]] = {
    "selective": ("GPU", ("actor.recompute=selective",)),
    "half": ("GPU", ("actor.recompute=full", "actor.recompute_layers=4")),
    "full": ("GPU", ("actor.recompute=full",)),
    "cpu-optimizer": ("GPU", ("actor.optimizer.device=cpu",)),
    "bf16-moments": ("Transformer Engine", ("actor.optimizer.moments=bfloat16",)),
    "fp8": ("FP8", ("actor.fp8.recipe=blockwise",)),
    "fp8-tensorwise": ("FP8", ("actor.fp8.recipe=tensorwise",)),
    "fp8-full": ("FP8", ("actor.fp8.recipe=blockwise", "actor.recompute=full")),
}

STEPS = (
    SelfTestStep(
        "versions",
        "without_engine.versions",
        "are all parts there, and do they load?",
        "the installation: make clean setup-gpu, and read its last lines; a driver older than 580 cannot load CUDA 13",
    ),
    SelfTestStep(
        "linear",
        "without_engine.linear",
        "does a linear layer of Transformer Engine compute what torch computes, in bf16 and FP8?",
        "cuBLAS or cuDNN of another version than the one that Transformer Engine was compiled with: run make setup-gpu again",
        need="Transformer Engine",
    ),
    SelfTestStep(
        "attention",
        "without_engine.attention",
        "does its attention over packed sequences compute what ours does?",
        "another cuDNN than the one that torch brought (step `versions`; CUDNN_HOME names a folder); NVTE_DEBUG=1 "
        "NVTE_DEBUG_LEVEL=2 says why kernels are left out; NVTE_FLASH_ATTN=0 or NVTE_FUSED_ATTN=0 chooses others",
        need="Transformer Engine",
    ),
    SelfTestStep(
        "actor",
        "without_engine.actor",
        "do the actor's log-probs equal those of transformers, and with Transformer Engine those of the plain layers?",
        "the weight map (models/) where `transformers` differs, a Transformer Engine layer where the "
        "plain layers do: compare them layer by layer",
    ),
    SelfTestStep(
        "output-layer",
        "without_engine.output_layer",
        "does the output layer's gradient, summed in fp32 by the matrix product, equal the one computed in float64?",
        "torch.addmm with out_dtype (actor/head.py `_accumulate`): on a card of another kind or with another torch it may "
        "differ",
    ),
    SelfTestStep(
        "checkpoint",
        "whole_runs.checkpoint",
        "does a run that resumes, also from step 0, end where an unbroken one does?",
        "the optimizer's state, with Transformer Engine FusedAdam's: checkpoint/gather_optimizer.py, checkpoint/store.py",
    ),
    SelfTestStep(
        "cpu-optimizer",
        "without_engine.cpu_optimizer",
        "does the optimizer on the CPU change the weights as the other one does?",
        "copies that were read before they had come (actor/host_adam.py): with CUDA_LAUNCH_BLOCKING=1 they are in order",
    ),
    SelfTestStep(
        "engine",
        "whole_runs.engine",
        "does the engine answer the same after sleep, reload and wake, give its memory back, and draw what it scores?",
        _SLEEP,
    ),
    SelfTestStep(
        "engine-moe", "whole_runs.engine_of_experts", "the same with experts; how long is a reload per tensor?", _SLEEP
    ),
    SelfTestStep(
        "rl",
        "whole_runs.rl",
        "three RL steps: do actor and engine agree after each?",
        "where the sync check failed: rollout.sync_tolerance, which is not calibrated on GPUs, if the mean is just "
        "above it; else docs/mismatch.md",
    ),
    SelfTestStep(
        "rl-offload",
        "whole_runs.rl",
        "the same with gradients and optimizer state off the card while the engine generates",
        "actor.offload (actor/offload.py): compare with the step `rl`, which does the same without it",
        need="GPU",
        overrides=("actor.offload=true",),
    ),
    SelfTestStep(
        "rl-fp8-rollouts",
        "whole_runs.rl",
        "the same with the engine's weights in FP8: how far is it from the actor?",
        "vLLM's kernels for blockwise FP8 on this card, or what its reload makes of values and scales (seams/vllm.py, "
        "models/fp8_weights.py); if the mean is just above it, rollout.sync_tolerance, which is not calibrated on GPUs",
        need="GPU",
        overrides=("rollout.fp8=blockwise",),
    ),
    SelfTestStep(
        "rl-ranks",
        "whole_runs.rl",
        "three RL steps on two ranks, with tensor and sequence parallelism",
        "NCCL between these cards (NCCL_DEBUG=INFO), or processes that do not see all GPUs: megatron-rl preflight",
        processes=2,
    ),
    SelfTestStep(
        "exact",
        "mismatch.exact",
        "with rollout.exact, are the engine's log-probs the actor's bit for bit in bf16?",
        _EXACT,
    ),
    SelfTestStep("exact-moe", "mismatch.exact_experts", "the same with experts", _EXACT),
    SelfTestStep(
        "rl-images",
        "whole_runs.rl_of_images",
        "three RL steps of a model with a vision tower: do actor and engine see the same in images?",
        "the tower, transformers' in the actor (modules/vision.py) and vLLM's own in the engine, or its processor of images "
        "(seams/vllm_images.py)",
    ),
    SelfTestStep(
        "fp8",
        "without_engine.fp8",
        "FP8 updates, blockwise and by tensor: how far are the log-probs from bf16's?",
        "shapes that FP8 does not take (rows or columns that are no multiple of 16 or 128), or the card lacks the recipe",
        need="FP8",
    ),
    SelfTestStep("speed", "speed.update", "updates of an 8B-shaped stack: share of the card's peak (MFU)", _SPEED),
    *(
        SelfTestStep(f"speed-{name}", "speed.update", f"the same with {', '.join(overrides)}", _SPEED, need, overrides)
        for name, (need, overrides) in _OPTIONS.items()
    ),
    SelfTestStep(
        "offload",
        "speed.offload",
        "GB/s of the offload, each way",
        _SPEED,
        need="GPU",
        overrides=("actor.offload=true",),
    ),
    SelfTestStep(
        "decode", "speed.decode", "tokens/s of the engine, with and without seeds; seconds of a weight sync", _SPEED
    ),
    SelfTestStep(
        "mismatch",
        "mismatch.dense",
        "in bf16, which operation differs in engine and actor, by how much?",
        _APART,
        asked=True,
    ),
    SelfTestStep("mismatch-moe", "mismatch.experts", "the same with experts", _APART, asked=True),
    SelfTestStep(
        "mismatch-fp8",
        "mismatch.dense",
        "the same with the engine's weights in FP8",
        _APART,
        overrides=("rollout.fp8=blockwise",),
        asked=True,
    ),
)
