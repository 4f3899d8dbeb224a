"""python -m benchmarks.drafts MODEL [--tokens N] [--epochs N]: vLLM on a CPU with drafts and without.

MODEL is a folder of the quick start's (`runs/quickstart/export`): eight responses to each of 32 sums, drawn once per epoch,
with other seeds. From the second epoch on, what a prompt's earlier responses went on with is drafted. Prints passes, CPU
seconds and accepted drafts of each epoch, with many sequences at a time and with few, and whether both drew the same bits.
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
from benchmarks.prefix_cache import ENVIRONMENT

if TYPE_CHECKING:
    from vllm import LLM

    from megatron_rl.rollout.drafts import Drafts

PROMPTS, GROUP = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--tokens", type=int, default=4, help="of a draft")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})
    for at_once in (64, 8):
        digests, seconds = set[str](), []
        for tokens in (0, args.tokens):
            llm, drafts = start(args.model, tokens, at_once)
            drawn = [draw(llm, drafts, epoch) for epoch in range(args.epochs)]
            digests.add(json.dumps([epoch.pop("digest") for epoch in drawn]))
            seconds.append(sum(epoch["cpu_seconds"] for epoch in drawn[1:]))
            for number, epoch in enumerate(drawn):
                print(json.dumps({"at_once": at_once, "draft": tokens, "epoch": number} | epoch), flush=True)
            del llm
        same = "the same bits" if len(digests) == 1 else "different tokens"
        print(
            f"{at_once} at a time: {same}; after the first epoch {seconds[0] / seconds[1]:.2f} times as fast with drafts"
        )


def start(model: str, tokens: int, at_once: int) -> tuple[LLM, Drafts]:
    from vllm import LLM

    from megatron_rl.rollout.drafts import Drafts
    from megatron_rl.seams.vllm_decoding import DecodeScheduler, draw_ahead

    proposer = {"method": "custom_class", "model": "megatron_rl.seams.vllm_drafts.Proposer"}
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=96,
        max_num_seqs=at_once,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        async_scheduling=False,
        kv_cache_memory_bytes=2**28,
        scheduler_cls=DecodeScheduler,
        disable_log_stats=True,
        speculative_config={**proposer, "num_speculative_tokens": tokens} if tokens else None,
    )
    llm.collective_rpc(lambda worker: draw_ahead(worker.model_runner.sampler.topk_topp_sampler))
    drafts = Drafts(tokens, below=at_once)
    if tokens:
        llm.collective_rpc(lambda worker: worker.model_runner.drafter.use(worker.model_runner, drafts))
    return llm, drafts


def draw(llm: LLM, drafts: Drafts, epoch: int) -> dict[str, Any]:
    """The responses of an epoch; what they were is remembered after it."""
    from vllm import SamplingParams

    rng, tokenizer, passes = random.Random(0), llm.get_tokenizer(), 0
    for number in range(PROMPTS):
        terms = [str(rng.randint(1, 9)) for _ in range(rng.randint(4, 6))]
        prompt = "".join(term + rng.choice("+-") for term in terms[:-1]) + terms[-1] + "="
        for index in range(GROUP):
            seed = (epoch * PROMPTS + number) * GROUP + index
            params = SamplingParams(max_tokens=56, seed=seed, logprobs=0, detokenize=False)
            request, tokens = f"{number}.{index}", tokenizer.encode(prompt)
            drafts.begin(request, (str(number), index), tokens)
            llm.llm_engine.add_request(request, {"prompt_token_ids": tokens}, params)
    drawn, began = dict[str, Any](), time.process_time()
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            [completion] = output.outputs
            logprobs = [
                one[token].logprob for one, token in zip(completion.logprobs, completion.token_ids, strict=True)
            ]
            drawn[output.request_id] = (list(completion.token_ids), logprobs)
        passes += 1
    seconds = time.process_time() - began
    counts = drafts.take_counts()
    drafts.end_step()
    return {
        "tokens": sum(len(tokens) for tokens, _ in drawn.values()),
        "passes": passes,
        "cpu_seconds": round(seconds, 2),
        "accepted": f"{counts['accepted']} of {counts['drafted']}",
        "digest": hashlib.sha256(json.dumps(sorted(drawn.items())).encode()).hexdigest(),
    }


if __name__ == "__main__":
    with told():
        main()
