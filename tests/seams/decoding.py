"""python decoding.py MODEL plain|short|drafts: what vLLM draws for requests that come, end, wait and are aborted; JSON.

`short` is with what `megatron_rl.seams.vllm_decoding` replaces, `drafts` with those of `seams.vllm_drafts` too. All also
print how many steps took the short way, and how many tokens were drafted and accepted.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(model: str, way: str) -> dict[str, Any]:
    from vllm import LLM

    from megatron_rl.rollout.drafts import Drafts
    from megatron_rl.seams.vllm_decoding import DecodeScheduler, draw_ahead

    drafts = {"method": "custom_class", "model": "megatron_rl.seams.vllm_drafts.Proposer", "num_speculative_tokens": 5}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=96,
        max_num_seqs=12,
        num_gpu_blocks_override=20,  # of 32 tokens: too few for all, so that some requests are put back
        block_size=32,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=2**24,
        **({} if way == "plain" else {"scheduler_cls": DecodeScheduler}),
        **({"speculative_config": drafts, "async_scheduling": False} if way == "drafts" else {}),
    )
    guesses = Drafts(tokens=5, below=12)
    if way != "plain":
        llm.collective_rpc(lambda worker: draw_ahead(worker.model_runner.sampler.topk_topp_sampler))
    if way == "drafts":
        llm.collective_rpc(lambda worker: worker.model_runner.drafter.use(worker.model_runner, guesses))
    engine, counts = llm.llm_engine, {"steps": 0, "short": 0, "preempted": 0}
    scheduler = engine.engine_core.engine_core.scheduler
    put_back = scheduler._preempt_request

    def preempt(*args: Any, **options: Any) -> None:
        counts["preempted"] += 1
        put_back(*args, **options)

    scheduler._preempt_request = preempt
    found: dict[str, Any] = {}
    arrivals = {0: range(9), 7: range(9, 12), 40: range(12, 30)}  # the last are more than are decoded at a time
    while counts["steps"] < 41 or engine.has_unfinished_requests():
        for number in arrivals.get(counts["steps"], ()):
            add(engine, number, guesses)
        if counts["steps"] == 12:
            engine.abort_request(["5"])
        for output in engine.step():
            assert output.finished, "outputs are of whole requests"
            [drawn] = output.outputs
            logprobs = drawn.logprobs
            numbers = None if logprobs is None else (logprobs.token_ids, logprobs.logprobs, logprobs.ranks)
            found[output.request_id] = (drawn.token_ids, numbers, drawn.finish_reason, drawn.stop_reason)
        counts["steps"] += 1
        counts["short"] += getattr(scheduler, "_short", None) is not None
    return {"drawn": found, **counts, **guesses.take_counts()}


def add(engine: Any, number: int, guesses: Any) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt = [1 + (number * 7 + i) % 50 for i in range(1 + number * 5 % 40)]
    parameters = SamplingParams(
        temperature=0.0 if number == 4 else 1.0,
        top_p=0.9 if number == 6 else 1.0,
        seed=1000 + number,
        max_tokens=3 + number * 11 % 70,  # one is cut at the model's length
        min_tokens=2 if number == 8 else 0,
        stop_token_ids=[5, 6] if number % 2 else [],
        ignore_eos=True,
        logprobs=None if number == 2 else 0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    guesses.begin(str(number), ("group", number), prompt)
    engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
