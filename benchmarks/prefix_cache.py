"""python -m benchmarks.prefix_cache MODEL [--order N ...]: conversations with vLLM on a CPU, with a prefix cache and without.

48 conversations of five turns, in groups of eight with the same prompt, whose turns come in an order of their own per
number. Prints CPU seconds, tokens that were read and found, and whether all orders drew the same tokens with log-probs of
the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from typing import TYPE_CHECKING, Any

from benchmarks.others import told

if TYPE_CHECKING:
    from vllm import LLM

CONVERSATIONS, TURNS, GROUP, FIRST_ID, LAST_ID = 48, 5, 8, 3, 60
PROMPTS = (10, 16, 40, 70)  # tokens
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--order", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})
    digests = set[str]()
    for keeps in (False, True):
        engine = start(args.model, args.dtype, keeps)
        for order in args.order:
            found = converse(engine, order)
            digests.add(found["digest"])
            print(json.dumps({"cache": keeps, "order": order} | found), flush=True)
    print("the same bits" if len(digests) == 1 else f"{len(digests)} different results")


def start(model: str, dtype: str, keeps: bool) -> LLM:
    from vllm import LLM

    from megatron_rl.seams.vllm_decoding import DecodeScheduler, draw_ahead

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=64,
        block_size=32 if keeps else 128,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        enable_prefix_caching=keeps,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=2**28,
        scheduler_cls=DecodeScheduler,
        disable_log_stats=True,
    )
    llm.collective_rpc(lambda worker: draw_ahead(worker.model_runner.sampler.topk_topp_sampler))
    return llm


def converse(llm: LLM, order: int) -> dict[str, Any]:
    """What the conversations have drawn, in an order of their turns; the cache is empty before."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm.reset_prefix_cache()
    engine, rng = llm.llm_engine, random.Random(order)
    tokens = {c: ids(f"prompt {c // GROUP}", PROMPTS[c // GROUP % len(PROMPTS)]) for c in range(CONVERSATIONS)}
    drawn: dict[int, list[Any]] = {c: [] for c in tokens}
    due = {c: rng.randint(0, 60) for c in tokens}  # the step in which a turn is asked for
    read = cached = step = 0
    began = time.process_time()
    while due or engine.has_unfinished_requests():
        for c in sorted(c for c in due if due[c] <= step):
            del due[c]
            turn = len(drawn[c])
            params = SamplingParams(
                seed=1000 * c + turn,
                max_tokens=random.Random(f"length {c} {turn}").randint(5, 30),
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(c), {"prompt_token_ids": tokens[c]}, params)
        for output in engine.step() if engine.has_unfinished_requests() else ():
            c, [completion] = int(output.request_id), output.outputs
            read, cached = read + len(tokens[c]), cached + (output.num_cached_tokens or 0)
            drawn[c].append((list(completion.token_ids), list(completion.logprobs.logprobs)))
            reply = f"reply {c} {len(drawn[c])}"
            tokens[c] = tokens[c] + list(completion.token_ids) + ids(reply, random.Random(reply).randint(2, 12))
            if len(drawn[c]) < TURNS:
                due[c] = step + rng.randint(0, 40)
        step += 1
    seconds = round(time.process_time() - began, 2)
    digest = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:12]
    return {"cpu_seconds": seconds, "read": read, "cached": cached, "digest": digest}


def ids(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


if __name__ == "__main__":
    with told():
        main()
