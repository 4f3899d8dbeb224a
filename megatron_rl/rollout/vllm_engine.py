"""The vLLM engine that lives in the trainer's processes.

Ranks are cut into engines of `rollout.tensor_parallel` consecutive ranks (vLLM's external launcher). All ranks of an engine
make the same calls with the same arguments, and vLLM's schedulers, being deterministic, stay in step.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_rl.base import exact_rows as exact
from megatron_rl.config.actor import LoRAConfig
from megatron_rl.config.rollout_keys import SpeculationConfig
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.data.images import ImageReader, PromptImages
from megatron_rl.models import HFConfig, Model, model_of, padded_vocab_size, read_hf_config
from megatron_rl.models import fp8_weights as fp8
from megatron_rl.models.gated_delta import GatedDelta
from megatron_rl.models.hf_config import stored_hf_config
from megatron_rl.models.lora import engine_options, targets_of
from megatron_rl.models.multi_latent import MultiLatent
from megatron_rl.modules.exact_layers import rotary_table
from megatron_rl.rollout import environment
from megatron_rl.rollout.drafts import Drafts
from megatron_rl.rollout.engine import Completion, EngineError, Request, score_by_queue
from megatron_rl.runtime import device, leaving
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.seams import torch_compile, vllm_lora
from megatron_rl.seams import vllm as seam
from megatron_rl.seams.vllm_experts import returned
from megatron_rl.seams.vllm_images import register_images_only, register_text_only
from megatron_rl.seams.vllm_models import inspected_here
from megatron_rl.weights.files import write_json
from megatron_rl.weights.stacked import one_by_one

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

# Tokens of a block of vLLM's cache on a CPU. Whole blocks are shared, so shorter prompts only pay for the search.
_CPU_BLOCK = 128
_CONVERSATION_BLOCK = 32  # the shortest that its attention on a CPU reads: turns are short


class VllmEngine:
    """This rank's part of one vLLM engine: an `Engine` that also takes ready-made shards of its weights.

    `folder` is a Hugging Face folder with config and tokenizer; weights come from the actor only. With
    `actor.lora.sync=adapters` only adapters do, beside the folder's weights. `images`: how many a prompt may have, of a
    model that reads them, and by what.
    """

    def __init__(
        self, config: Config, grid: ProcessGrid, folder: str | Path, images: tuple[int, ImageReader] | None = None
    ) -> None:
        self.config = config.rollout
        if grid.engine.size != self.config.tensor_parallel:
            raise ValueError(f"an engine of {self.config.tensor_parallel} ranks in groups of {grid.engine.size}")
        self.version, self.room = 0, self.config.max_concurrent
        self._queue: dict[str, Request] = {}
        environment.prepare(self.config.exact)
        gc.disable()  # as in trainer.rank.main: vLLM's modules are as many again
        with torch_compile.left_out_of_vllm():
            from vllm import LLM

        hf_config = read_hf_config(folder)
        model = model_of(config.model.completed(hf_config))
        options = llm_options(config, folder, hf_config, model, None if images is None else images[0])
        self._stacking = model.family.stacking
        self.max_scored = max_length(self.config, model) - 1
        self._in_fp8 = frozenset[str]()
        if self.config.fp8 != "none":
            self._in_fp8 = fp8.quantised_modules(model, self.config.fp8_skip)
        self._parameters_in_fp8 = fp8.vllm_parameters(model, self._in_fp8)
        self._adapters: LoRAConfig | None = None  # that the engine adds itself
        lora = config.actor.lora
        if lora is not None and lora.sync == "adapters":
            self._adapters, self._targets = lora, targets_of(lora, model)
        self._sees = images is not None
        register_text_only(model.family.architectures[0])
        if images is not None:
            register_images_only(model.family.architectures[0], images[1].processor)
        self.experts: np.dtype | None = None
        if config.actor.moe.routing_replay == "rollout":
            assert model.experts is not None  # checked with the recipe
            kind = np.uint8 if model.experts.count <= 256 else np.uint16
            self.experts = np.dtype((kind, (model.dims["layers"], model.experts.top_k)))
        around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.experts is not None:
            around = returned(device.has_gpu())
        elif self.config.exact and device.has_gpu():
            from megatron_rl.seams import vllm_invariant

            around = vllm_invariant.without_replaced_operators()
        self._keeps_prefixes = bool(options["enable_prefix_caching"])
        leaving.freeze()
        with environment.engine_start(grid), around, inspected_here(), TemporaryDirectory() as of_text:
            if hf_config != stored_hf_config(folder):  # the language model's alone
                write_json(Path(of_text) / "config.json", hf_config)
                options["hf_config_path"] = of_text
            self.llm = LLM(**options)
        gc.enable()
        seam.quiet_reload_messages()
        if self.config.exact:
            self._make_exact(model, config.actor.parallel.tensor, options["dtype"])
        self.drafts: Drafts | None = None
        if (speculation := self.config.speculation) is not None:
            self.drafts = Drafts(speculation.tokens, speculation.below)
            self.llm.collective_rpc(lambda worker: worker.model_runner.drafter.use(worker.model_runner, self.drafts))

    def _make_exact(self, model: Model, actor_ranks: int, dtype: str) -> None:
        from megatron_rl.seams.vllm_exact import make_exact

        if device.has_gpu():
            from megatron_rl.seams.vllm_invariant import attend_from

            unsteady = exact.check_machine(attend_from, device.device(), getattr(torch, dtype), width=4096)
        else:
            unsteady = exact.check_machine()
        if unsteady:
            raise EngineError(
                f"rollout.exact: on this machine a token's {', '.join(unsteady)} (base/exact_rows.py) depends on what is "
                "computed with it; set it to false"
            )
        rows, size = padded_vocab_size(model.dims["vocab"], actor_ranks) // actor_ranks, model.dims["vocab"]
        shards = [min(rows, size - first) for first in range(0, size, rows)]
        over_all = bool(model.description.transformer.get("moe_router_pre_softmax"))
        turns = rotary_table(model)
        self.llm.collective_rpc(make_exact, args=(turns, shards, over_all))

    # -------------------------------------------------------------------------------------------------------- queue
    @property
    def pending(self) -> int:
        return len(self._queue)

    def submit(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        prompts = [_prompt(request) for request in requests]
        names = self.llm.enqueue(
            prompts,
            [_parameters(request) for request in requests],
            lora_request=None if self._adapters is None else vllm_lora.request(),
            use_tqdm=False,
        )
        # vLLM adds to a name what makes it unique; its outputs have the name without.
        added = {name.partition("-")[0]: request for name, request in zip(names, requests, strict=True)}
        self._queue |= added
        if self.drafts is not None:
            for name, request in added.items():
                if not request.scores_tokens:
                    self.drafts.begin(name, request.name, request.tokens)

    def step(self) -> list[Completion]:
        """One forward pass of the engine, by all of its ranks together; returns what ended with it."""
        ended = []
        for output in self.llm.llm_engine.step() if self._queue else ():
            if output.finished:
                request = self._queue.pop(output.request_id)
                if self.drafts is not None and not request.scores_tokens:
                    self.drafts.end(output.request_id, len(output.outputs[0].token_ids))
                ended.append(_completion(request, output, self.version, self.experts))
        return ended

    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None] = ()) -> list[np.ndarray]:
        return score_by_queue(self, sequences, images)

    # ------------------------------------------------------------------------------------------------------ weights
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._adapters is None:
            sinks: dict[str, Tensor] = {}
            rest = seam.without_sinks(one_by_one(self.stored(weights), self._stacking), sinks)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": rest})
            if sinks:
                self.llm.apply_model(lambda model: seam.load_sinks(model, sinks))
        else:
            vllm_lora.load(self.llm, weights, self._adapters.rank, self._adapters.scale, self._targets)
        self._has_taken(version)

    @contextlib.contextmanager
    def loading_shards(self, wanted: Mapping[str, int], version: int) -> Iterator[seam.ShardLoader]:
        """While entered, takes this rank's shards of vLLM's parameters; at the end all of them have to be there.
        `wanted`: elements that come, by parameter; `version`: as of `load`.
        """
        with seam.loading_shards(self.llm, wanted, self._parameters_in_fp8) as loader:
            yield loader
        self._has_taken(version)

    def shard_shapes(self) -> dict[str, tuple[int, ...]]:
        """vLLM's parameters on this rank, as they are loaded."""
        [shapes] = self.llm.apply_model(seam.loaded_shapes)
        return shapes

    def _has_taken(self, version: int) -> None:
        """Drops what old weights left, after new ones: cached prefixes, and what a vision tower saw, are old ones'."""
        if self.drafts is not None:
            self.drafts.end_step()
        if self._sees:
            self.llm.llm_engine.reset_encoder_cache()
        if not (self.llm.reset_prefix_cache() if self._keeps_prefixes else not self._queue):
            raise EngineError(
                "vLLM kept its cached prefixes after a weight sync, because a request still holds a part of its cache; "
                "responses would mix keys and values of old weights with new ones. rollout.async_scheduling=false shows "
                "whether a batch was still under way"
            )
        self.version = version

    def stored(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights as the engine holds them: with `rollout.fp8` as values and scales; on a CPU, which has no kernel for
        them, as the numbers that these stand for."""
        return fp8.stored(weights, self._in_fp8, rounded=not device.has_gpu())

    # -------------------------------------------------------------------------------------------------- GPU memory
    def sleep(self) -> None:
        """GPU: frees the memory of weights and KV cache; weights beside adapters, which no sync brings, go to the host. CPU:
        no effect, nor has `wake` any."""
        if device.has_gpu():
            self.llm.sleep(level=2 if self._adapters is None else 1)

    def wake(self, part: Literal["weights", "cache"]) -> None:
        if device.has_gpu():
            self.llm.wake_up(tags=["weights" if part == "weights" else "kv_cache"])

    def shutdown(self) -> None:
        seam.shutdown(self.llm)


def max_length(config: RolloutConfig, model: Model) -> int:
    """Tokens of the longest sequence: one more than a rollout has, where the model allows it, because scoring a rollout
    draws one token more, then dropped."""
    return min(config.max_prompt_tokens + config.max_tokens + 1, model.description.max_positions)


def llm_options(
    config: Config, folder: str | Path, hf_config: HFConfig, model: Model, most_images: int | None = None
) -> dict[str, Any]:
    """All that `vllm.LLM`, and so `vllm.EngineArgs`, is given on this machine. `hf_config`: the folder's. `most_images`: in a
    prompt, of a model that reads them."""
    rollout, replayed = config.rollout, config.actor.moe.routing_replay == "rollout"
    length = max_length(rollout, model)
    conversing = any(task.agent is not None for task in (*config.tasks.train.values(), *config.tasks.eval.values()))
    conversing = conversing or rollout.partial is not None  # a response's next chunk finds the one before
    options: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(folder),
        "dtype": config.model.dtype,
        "load_format": "dummy",
        "tensor_parallel_size": rollout.tensor_parallel,
        "enable_expert_parallel": rollout.expert_parallel,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": length,
        "max_num_seqs": rollout.max_concurrent,
        "max_num_batched_tokens": max(8192, length),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # the recipe decides how to sample, not the model folder
        # With routing replay the cache's blocks keep the experts. Turns of a conversation find the earlier ones: what is left
        # in the cache depends on who asked first, and what is drawn does not, for on a CPU keys and values have the same bits
        # whether tokens were drawn one by one or are read at once, in whatever batch (tests/agents/inside.py).
        # Of gated-delta layers' states vLLM 0.32 keeps what the end of a block needs only where it is asked to align them.
        "enable_prefix_caching": not isinstance(model.attention, GatedDelta)
        and (device.has_gpu() or replayed or conversing or rollout.max_prompt_tokens > _CPU_BLOCK),
        "disable_log_stats": True,
        "enable_return_routed_experts": replayed,
        "seed": config.seed,
    }
    options |= gpu_options(rollout, model) if device.has_gpu() else cpu_options(rollout, model)
    if rollout.speculation is not None:
        options |= {"speculative_config": speculation_options(rollout.speculation), "async_scheduling": False}
    if conversing and options["enable_prefix_caching"] and not device.has_gpu():
        options |= {} if isinstance(model.attention, MultiLatent) else {"block_size": _CONVERSATION_BLOCK}
    if config.model.rope_scaling is not None:
        read = model.description.rope
        rope = {**config.model.rope_scaling.fields(), "rope_theta": read.theta}
        rope |= {} if read.share == 1 else {"partial_rotary_factor": read.share}
        longer = {"rope_parameters": rope, "max_position_embeddings": model.description.max_positions}
        options["hf_overrides"] = {**options.get("hf_overrides", {}), **longer}
    if config.actor.lora is not None and config.actor.lora.sync == "adapters":
        options |= engine_options(config.actor.lora, model)
    if most_images is not None:
        options |= images_options(most_images)
    if hf_config.get("quantization_config"):  # weights come as the actor has them
        options["hf_overrides"] = partial(seam.unquantised, changes=options.get("hf_overrides", {}))
    return options


def gpu_options(config: RolloutConfig, model: Model) -> dict[str, object]:
    """vLLM's options on a GPU."""
    options: dict[str, object] = {}
    if model.experts:
        # Other kernels for experts reorder the weights, or keep tensors that are garbage after sleep; Triton's keep them.
        options["moe_backend"] = "triton"
    if config.exact:  # graphs are captured before its modules are replaced
        options |= {"attention_backend": "TRITON_ATTN", "enforce_eager": True}
    if config.fp8 != "none":  # as if config.json said so
        modules = fp8.quantised_modules(model, config.fp8_skip)
        options["hf_overrides"] = {
            "quantization_config": fp8.quantization_config(model.family, model.description, modules)
        }
    return {
        "gpu_memory_utilization": config.memory_fraction,
        "enable_sleep_mode": True,
        "async_scheduling": config.async_scheduling,
        "enable_flashinfer_autotune": False,  # at each start; no operator that it tunes is used here
        **options,
    }


def speculation_options(config: SpeculationConfig) -> dict[str, object]:
    """vLLM's options for drafts of `Drafts`. A batch is prepared after the last one, whose tokens the drafts follow."""
    proposer = "megatron_rl.seams.vllm_drafts.Proposer"
    return {"method": "custom_class", "model": proposer, "num_speculative_tokens": config.tokens}


def images_options(most: int) -> dict[str, object]:
    """vLLM's options for a model that reads at most `most` images in a prompt."""
    return {
        "limit_mm_per_prompt": {"image": most},
        "mm_encoder_tp_mode": "data",  # the tower whole on every rank, as the actor has it
        "mm_device_do_normalize": False,  # by the processor, as for the actor; and load_format=dummy spoils its constants
        "mm_processor_cache_gb": 1,
    }


def cpu_options(config: RolloutConfig, model: Model) -> dict[str, object]:
    """vLLM's options on a CPU."""
    # Where the CPU has tiles, vLLM would take kernels that read no float32.
    latent = {"attention_backend": "CPU_MLA"} if isinstance(model.attention, MultiLatent) else {}
    return {
        **latent,
        "enforce_eager": True,
        "worker_cls": "megatron_rl.seams.vllm_cpu_worker.ColocatedCpuWorker",
        "scheduler_cls": "megatron_rl.seams.vllm_decoding.DecodeScheduler",
        "kv_cache_memory_bytes": int(config.cpu_cache_gib * 2**30),
        "enable_chunked_prefill": False,  # a prompt read in two parts rewinds its seed, which no CPU generator can
    }


def _prompt(request: Request) -> dict[str, object]:
    """vLLM repeats an image's token by itself."""
    if request.images is None:
        return {"prompt_token_ids": list(request.tokens)}
    tokens = request.images.collapsed(request.tokens)
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": request.images.pictures()}}


def _parameters(request: Request) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        max_tokens=request.sampling.max_tokens,
        seed=request.seed,
        logprobs=0,
        prompt_logprobs=0 if request.scores_tokens else None,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,  # nobody else has them
    )


def _completion(request: Request, output: RequestOutput, version: int, of_experts: np.dtype | None) -> Completion:
    [drawn] = output.outputs
    scores: list[float] = []
    if request.scores_tokens:
        flat = output.prompt_logprobs
        scores = [flat.logprobs[flat.start_indices[i]] for i in range(1, len(request.tokens))]
    token_scores = np.asarray(scores, dtype=np.float32)
    experts: np.ndarray | None = drawn.routed_experts
    if of_experts is not None:
        if experts is None or (experts.dtype, experts.shape[1:]) != of_experts.subdtype:
            described = "none" if experts is None else f"{experts.dtype} of shape {experts.shape}"
            raise EngineError(f"vLLM has returned experts that are not a token's {of_experts}: {described}")
        # Nothing was computed of the last token, and nothing reads what the actor computes of it.
        experts = np.concatenate([experts, experts[-1:]])
    return Completion(
        request,
        drawn.token_ids,
        drawn.logprobs.logprobs,
        str(drawn.finish_reason),
        version,
        token_scores,
        experts,
        output.num_cached_tokens or 0,
    )
