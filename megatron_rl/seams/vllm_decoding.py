"""vLLM: what its Python does for every token that is decoded on a CPU. Written for 0.32.

For each token of each request vLLM's scheduler asks what might have happened (a drafted token, an image, a full block of the
cache, a paused session), makes an output of it, and its output processor takes that apart again; the sampler calls torch for
one random number. For a small model that is a third of the generation. Both have a short way here, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from megatron_rl.seams import check_parameters

FORWARD_CPU = "self logits generators k p"
_AHEAD = 64  # numbers that are drawn from a request's generator at once


class DecodeScheduler(Scheduler):
    """vLLM's scheduler, with a short way through steps in which each running request decodes one token and none waits.

    What such a step draws is kept here; the engine's output of a request comes with its last token, or with the next step
    that is none of these.
    """

    running: list[Request]

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        groups = self.kv_cache_config.kv_cache_groups
        self._is_plain = (
            len(groups) == 1
            and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            and not self.cache_config.enable_prefix_caching
            and (self.connector, self.ec_connector, self.aux_output_connector) == (None, None, None)
            and self.vllm_config.speculative_config is None
            and not (self.use_pp or self.log_stats or self.return_sampling_mask)
        )
        self._steps = 0  # short steps that can follow
        self._short: SchedulerOutput | None = None  # the last one
        self._kept: dict[str, list[tuple[int, LogprobsLists | None, int]]] = {}  # name -> tokens, and rows of log-probs

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if (
            not (self._steps and self.running)
            or (self.waiting or self.kv_holding_waiting)
            or self._pause_state != PauseState.UNPAUSED
        ):
            self._short = None
            return super().schedule(throttle_prefills)
        self._steps -= 1
        running, self.running = self.running, []
        output = super().schedule(throttle_prefills)  # what there is to say besides running requests
        self.running = running
        names = [request.request_id for request in running]
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        output.total_num_scheduled_tokens = len(names)
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(names),
            num_computed_tokens=[request.num_computed_tokens for request in running],
            num_output_tokens=[request.num_output_tokens for request in running],
        )
        self.prev_step_scheduled_req_ids.update(names)
        for request in running:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
        self._short = output
        return output

    def update_from_output(self, scheduled: SchedulerOutput, drawn: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        is_short = scheduled is self._short
        if is_short:
            scheduled = replace(scheduled, num_scheduled_tokens=self._keep(scheduled, drawn))
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduled, drawn)
        for of_client in outputs.values():
            for output in of_client.outputs:
                self._complete(output)
        if not is_short:
            self._kept = {name: kept for name, kept in self._kept.items() if name in self.requests}
            self._steps = min(map(self._steps_of, self.running), default=0) if self._is_plain else 0
        return outputs

    def _keep(self, scheduled: SchedulerOutput, drawn: ModelRunnerOutput) -> dict[str, int]:
        """Keeps the tokens of a short step; but those that end a request are vLLM's to handle, and are returned."""
        ending = {}
        for name in scheduled.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.is_finished():  # aborted meanwhile
                continue
            row = drawn.req_id_to_index[name]
            [token] = drawn.sampled_token_ids[row]
            if token in request.sampling_params.all_stop_token_ids:
                ending[name] = 1
                continue
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(token)
            self._kept.setdefault(name, []).append((token, drawn.logprobs, row))
        return ending

    def _complete(self, output: EngineCoreOutput) -> None:
        """Puts a request's kept tokens before those of its output."""
        tokens = self._kept.pop(output.request_id, None)
        if not tokens:
            return
        output.new_token_ids = [token for token, _, _ in tokens] + output.new_token_ids
        if (last := output.new_logprobs) is not None:
            fields = (
                [lists[i][row : row + 1] for _, lists, row in tokens if lists is not None] + [last[i]] for i in range(3)
            )
            output.new_logprobs = LogprobsLists(*map(np.concatenate, fields))

    def _steps_of(self, request: Request) -> int:
        """Steps in which a request decodes one token each, has a place for it in the cache, and does not reach a limit."""
        sampling = request.sampling_params
        if (
            request.num_tokens_with_spec - request.num_computed_tokens != 1
            or request.request_id not in self.prev_step_scheduled_req_ids
            or (sampling is None or sampling.min_tokens or sampling.repetition_detection is not None)
            or (request.structured_output_request is not None or request.resumable or request.num_output_placeholders)
        ):
            return 0
        [blocks] = self.kv_cache_manager.get_block_ids(request.request_id)
        return min(
            len(blocks) * self.block_size - request.num_computed_tokens,
            request.max_tokens - request.num_output_tokens - 1,
            self.max_model_len - request.num_tokens - 1,
        )


class _Numbers:
    """Random numbers of a request's generator, drawn many at a time, and given back in part."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.used = 0

    def next(self, generator: torch.Generator) -> int:
        if self.used == len(self.values):
            fresh = torch.randint(0, 2**31, (_AHEAD,), generator=generator).tolist()
            self.values, self.used = self.values[-_AHEAD:] + fresh, len(self.values[-_AHEAD:])
        self.used += 1
        return self.values[self.used - 1]


_numbers: WeakKeyDictionary[torch.Generator, _Numbers] = WeakKeyDictionary()


def draw_ahead(sampler: TopKTopPSampler, log_softmax: Callable[[Tensor], Tensor] = Sampler.compute_logprobs) -> None:
    """From here on a sampler of a CPU draws a request's random numbers many at a time. They are the same numbers.

    `log_softmax`: [tokens, vocabulary] logits to log-probs, which the engine returns.
    """
    check_parameters(TopKTopPSampler.forward_cpu, FORWARD_CPU)

    def next_seed(generator: torch.Generator) -> int:
        if (numbers := _numbers.get(generator)) is None:
            numbers = _numbers[generator] = _Numbers()
        return numbers.next(generator)

    def forward(
        logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if sampler.use_fp64_gumbel or sampler.logprobs_mode != "processed_logprobs":
            return sampler.forward_cpu(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        seeds = torch.randint(0, 2**31, (len(logits),))
        if generators:
            seeds[list(generators)] = torch.tensor([next_seed(generator) for generator in generators.values()])
        drawn = torch.ops._C.fused_gumbel_argmax(logits.float(), seeds)
        return drawn, log_softmax(logits)

    sampler.forward = forward


def give_back(generator: torch.Generator, drawn: int, used: int) -> None:
    """Takes back what a sampler drew last from a request's generator, but for the first numbers: the rest come again.

    A CUDA generator counts in steps of four per draw, as vLLM itself rewinds it; a draw of one row takes one.
    """
    if generator.device.type != "cpu":
        generator.set_offset(generator.get_offset() - 4 * (drawn - used))
    elif (numbers := _numbers.get(generator)) is not None:
        numbers.used -= drawn - used
