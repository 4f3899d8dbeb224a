"""The vLLM engine that lives in the trainer's processes: sampling, scoring, sleep and wake.

Ranks are cut into engines of `rollout.tensor_parallel` consecutive ranks (vLLM's external launcher). All ranks of an engine
make the same calls with the same arguments, and vLLM's schedulers, being deterministic, stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data import Rollout, Sample
from megatron_rl.models import read_hf_config
from megatron_rl.rollout import environment, packed
from megatron_rl.rollout.sampling import Sampling, rollout_seed
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import Grid


class Engine:
    """This rank's part of one vLLM engine.

    Args:
        config: the recipe.
        grid: where this process stands.
        folder: Hugging Face folder with config and tokenizer; weights come by `load_weights` only.
    """

    def __init__(self, config: Config, grid: Grid, folder: str | Path) -> None:
        self.config, self.grid = config.rollout, grid
        self.seed = config.seed
        tp = self.config.tensor_parallel
        self.index, self.engines = grid.rank // tp, grid.world // tp
        self.is_leader = grid.rank % tp == 0
        self.version = 0  # optimizer steps behind the engine's weights
        environment.prepare()
        from vllm import LLM

        # One more than a rollout has, where the model allows it: scoring a whole rollout draws a token that nobody reads.
        max_length = self.config.max_prompt_tokens + self.config.max_tokens + 1
        max_length = min(max_length, read_hf_config(folder).get("max_position_embeddings", max_length))
        self.max_scored = max_length - 1  # longest sequence that `score` takes, in tokens
        options: dict[str, Any] = {}
        if device.has_gpu():
            options |= {
                "gpu_memory_utilization": self.config.memory_fraction,
                "enable_sleep_mode": True,
            }
        else:
            options |= {
                "enforce_eager": True,
                "worker_cls": "megatron_rl.rollout.cpu_worker.ColocatedCpuWorker",
                "kv_cache_memory_bytes": int(self.config.cpu_cache_gib * 2**30),
                "enable_chunked_prefill": False,  # a prompt read in two parts rewinds its seed, which no CPU generator can
            }
        with environment.engine_start(grid):
            self.llm: Any = LLM(
                model=str(folder),
                tokenizer=str(folder),
                load_format="dummy",
                dtype=config.model.dtype,
                tensor_parallel_size=tp,
                distributed_executor_backend="external_launcher",
                max_model_len=max_length,
                max_num_seqs=self.config.max_concurrent,
                max_num_batched_tokens=max(8192, max_length),
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # the recipe decides how to sample, not the model folder
                enable_prefix_caching=True,
                disable_log_stats=True,
                seed=config.seed,
                **options,
            )
        environment.quiet_reload_messages()

    # ----------------------------------------------------------------------------------------------------- sampling
    def generate(
        self,
        samples: Sequence[Sample],
        count: int,
        sampling: Sampling,
        step: int,
        finished: Callable[[Rollout], None] | None = None,
        there: Container[tuple[str, int]] = (),
    ) -> list[Rollout]:
        """`count` rollouts of every sample, over all engines; every rank gets all of them, by sample, then index.

        Each rollout has a seed of its own (`rollout_seed`), so what is drawn depends neither on the number of engines nor on
        what else is in the batch.

        `finished` hears of every rollout of this rank's engine as it ends, on every rank of the engine in the same order.
        Rollouts that are `there`, by sample id and index, are not drawn; the same ones on every rank.
        """
        from vllm import SamplingParams

        own = [(s, i) for s in samples[self.index :: self.engines] for i in range(count) if (s.id, i) not in there]
        requests = [{"prompt_token_ids": sample.prompt_ids} for sample, _ in own]
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                seed=rollout_seed(self.seed, step, sample.id, index) if sampling.temperature > 0 else None,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for sample, index in own
        ]
        rollouts = []
        for number, output in self._run(requests, params):
            if self.is_leader or finished is not None:
                rollouts.append(_rollout(*own[number], output.outputs[0], self.version))
                if finished is not None:
                    finished(rollouts[-1])
        parts = self.grid.all_gather(rollouts if self.is_leader else [])
        everything = [rollout for part in parts for rollout in part]
        place = {sample.id: i for i, sample in enumerate(samples)}
        return sorted(everything, key=lambda rollout: (place[rollout.sample_id], rollout.index))

    def _run(self, requests: Sequence[Any], params: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Position in `requests` and vLLM's output of each request, as they end. All ranks of an engine step together."""
        if not requests:
            return
        names = self.llm.enqueue(requests, params, use_tqdm=False)
        # vLLM adds to a name what makes it unique; its outputs have the name without.
        place = {name.partition("-")[0]: number for number, name in enumerate(names)}
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    yield place[output.request_id], output

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first, under the engine's current weights.

        Every engine scores all sequences; returns this rank's own engine's answer, float32 [len - 1] each.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(tokens)} for tokens in sequences], params, use_tqdm=False
        )
        scores = []
        for tokens, output in zip(sequences, outputs, strict=True):
            flat = output.prompt_logprobs
            values = [flat.logprobs[flat.start_indices[i]] for i in range(1, len(tokens))]
            scores.append(np.asarray(values, dtype=np.float32))
        return scores

    # ------------------------------------------------------------------------------------------------------ weights
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces every weight by the (Hugging Face name, full tensor) pairs and drops cached prefixes.

        Args:
            version: optimizer steps behind these weights; rollouts drawn from them carry it.
        """
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()
        self.version = version

    def parameters(self) -> dict[str, Tensor]:
        """The engine's own parameters on this rank, for diagnosis."""
        [named] = self.llm.apply_model(lambda model: dict(model.named_parameters()))
        return named

    def packed_weights(self) -> dict[str, Callable[[], Tensor]]:
        """CPU: what reads a linear layer's weight back from its kernel's copy on this rank, by Hugging Face name."""
        [readers] = self.llm.apply_model(packed.weights)
        return readers

    def stale_layers(self) -> list[str]:
        """CPU: layers whose kernel's copy of a weight is not the weight that they hold on this rank."""
        [names] = self.llm.apply_model(packed.stale_layers)
        return names

    # -------------------------------------------------------------------------------------------------- GPU memory
    def sleep(self) -> None:
        """GPU: gives back the memory of weights and KV cache. The next use must wake and reload. CPU: nothing to give."""
        if device.has_gpu():
            self.llm.sleep(level=2)

    def wake_weights(self) -> None:
        if device.has_gpu():
            self.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        if device.has_gpu():
            self.llm.wake_up(tags=["kv_cache"])

    def shutdown(self) -> None:
        """Must come before the process group is destroyed."""
        self.llm.llm_engine.engine_core.shutdown()


def _rollout(sample: Sample, index: int, completion: Any, version: int) -> Rollout:
    logprobs = completion.logprobs.logprobs
    return Rollout.single_turn(sample, index, completion.token_ids, str(completion.finish_reason), logprobs, version)
