"""What a step gains by scoring rollouts while others are generated: one real engine, and a judge that takes its time.

`python -m benchmarks.reward_overlap` draws the same rollouts twice from a small random model on vLLM, scored by a local judge
server once after and once during generation, and compares seconds and scores. `--latency` and `--in-flight` say how slow
the judge is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.others import told

PROMPTS, GROUP, MAX_TOKENS = 64, 8, 256


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--latency", type=float, default=0.25, help="seconds the judge takes per request (default: 0.25)"
    )
    parser.add_argument("--in-flight", type=int, default=32, help="requests at a time (default: 32)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements of each kind; the first is not counted (default: 3)"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(_serve(args.latency))
        return 0
    command = [sys.executable, "-m", "benchmarks.reward_overlap", "--serve", "--latency", str(args.latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            with tempfile.TemporaryDirectory() as folder:
                _measure(Path(folder), url, args.in_flight, args.rounds)
        finally:
            server.kill()
    return 0


async def _serve(latency: float) -> None:
    """A judge whose grade is a function of the request, after `latency` seconds."""
    from aiohttp import web

    async def chat(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][-1]["content"]
        await asyncio.sleep(latency)
        message = {"role": "assistant", "content": f'{{"score": {(0.0, 0.25, 0.5, 0.75, 0.9, 1.0)[len(text) % 6]}}}'}
        return web.json_response({"choices": [{"message": message}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    print(f"http://127.0.0.1:{port}/v1", flush=True)
    await asyncio.Event().wait()


def _measure(folder: Path, url: str, in_flight: int, rounds: int) -> None:
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
    }
    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    from transformers import AutoTokenizer

    from megatron_rl.config.model import CreateModelConfig
    from megatron_rl.config.schema import Config, RewardConfig
    from megatron_rl.data.sample import Sample
    from megatron_rl.rewards import Scorer
    from megatron_rl.rollout.sampling import Sampling
    from megatron_rl.rollout.vllm_engine import VllmEngine
    from megatron_rl.runtime import distributed
    from megatron_rl.runtime.step_timer import StepTimer
    from megatron_rl.tasks.loading import Prompts
    from megatron_rl.trainer.report import Reporter
    from megatron_rl.trainer.sampler import Sampler
    from megatron_rl.weights.create import create_model

    config = Config(run_dir=str(folder))
    config.model.dtype = "float32"
    config.rollout.max_prompt_tokens, config.rollout.max_tokens, config.rollout.cpu_cache_gib = 16, MAX_TOKENS, 0.5
    create_model(folder / "model", CreateModelConfig(layers=2, hidden_size=64, heads=2, head_dim=32), seed=0)
    grid = distributed.initialize(config.actor.parallel, 10)
    engine = VllmEngine(config, grid, folder / "model")
    samples = [
        Sample(id=f"t/{i}", task="t", prompt=str(i), prompt_ids=[2 + i % 10, 2 + i // 10]) for i in range(PROMPTS)
    ]
    prompts, tokenizer = Prompts([], {}, None), AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False)
    report = Reporter(config, folder, grid)
    params = {"urls": url, "model": "m", "max_in_flight": in_flight}

    class After(Scorer):
        starts_early = False  # nothing is started early

    seconds: dict[str, list[tuple[float, float]]] = {"after": [], "during": []}
    rewards: dict[str, list[Any]] = {"after": [], "during": []}
    shares = []
    for step in range(rounds):
        for kind, make in (("after", After), ("during", Scorer)):
            scorer = make({"judge": RewardConfig(reward="judge", params=params)})  # a new one: nothing is cached
            sampler = Sampler(config, grid, folder / "model", tokenizer, prompts, scorer, report, StepTimer())
            sampler.use(engine)
            begin = time.perf_counter()
            rollouts = sampler.generate(samples, GROUP, Sampling(1.0, 1.0, MAX_TOKENS), step)
            middle = time.perf_counter()
            sampler.score(rollouts)
            seconds[kind].append((middle - begin, time.perf_counter() - middle))
            held = sorted(rollouts.held.items())
            rewards[kind].append([(row, rollout.text, rollouts.rewards_of(row)) for row, rollout in held])
            if kind == "during":
                shares.append(sampler.take_counters()["reward_overlap/share"])
            scorer.close()
    engine.shutdown()
    distributed.shutdown()
    assert rewards["after"] == rewards["during"], "scores depend on when they are asked for"
    total = {}
    for kind, rows in seconds.items():
        kept = rows[1:] or rows
        generating, waiting = (sorted(row[i] for row in kept)[len(kept) // 2] for i in (0, 1))
        total[kind] = generating + waiting
        print(
            f"scored {kind:>6} generation: {generating:5.2f} s generating + {waiting:5.2f} s waiting = {total[kind]:5.2f} s"
        )
    early = f"{shares[-1]:.0%} of {PROMPTS * GROUP} grades came early"
    print(f"{total['after'] / total['during']:.2f} times as fast; {early}; the same rewards")


if __name__ == "__main__":
    with told():
        sys.exit(main())
