"""Steps with whole runs: checkpoint and resume, the engine's sleep and wake, RL."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_rl.config import Config
from megatron_rl.config.model import CreateVisionConfig
from megatron_rl.rollout.engine import Request, drain
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime import device
from megatron_rl.selftest.bench import SHAPE, Bench, Figures, Surprise, expect, weights
from megatron_rl.trainer.loop import train
from megatron_rl.trainer.run import Run, build_run
from megatron_rl.trainer.sft import sft

_LEAK = 0.25  # GiB that a cycle of sleep and wake may keep
_GIB = 2**30


def checkpoint(bench: Bench) -> Figures:
    """Fine-tuning, which needs no engine: three steps from the checkpoint of step 0, and two more from that of step 1."""
    folder = bench.model(SHAPE)
    every_step = ("checkpoint.every=1", "checkpoint.keep=9")
    config = bench.recipe(folder, "unbroken", *every_step)
    first = build_run(config, bench.grid, Path(config.run_dir), "sft")
    first.learner.actor.start_optimizer(config.sft.optimizer, config.sft.steps)
    start = weights(first.learner.actor)
    first.checkpoints.save(first.state)  # the optimizer has not taken a step yet
    first.checkpoints.finish()
    sft(first, "auto")
    config = bench.recipe(folder, "resumed", *every_step)
    second = build_run(config, bench.grid, Path(config.run_dir), "sft")
    sft(second, str(bench.folder / "unbroken" / "checkpoints" / "step_1"))
    one, other = weights(first.learner.actor), weights(second.learner.actor)
    moved = max(float((one[name] - start[name]).abs().mean()) for name in one)
    apart = {name: float((one[name] - other[name]).abs().mean()) / moved for name in one}
    worst = max(apart, key=lambda name: apart[name])
    first.close()
    second.close()
    most = 0.02 if bench.gpu else 0.0  # attention's backward pass adds in any order on a GPU
    if not moved > 0:
        raise Surprise("three steps of fine-tuning have not changed the weights")
    text = f"the mean difference of {worst} from an unbroken run's, as a share of what training moved,"
    return {"resumed vs unbroken": expect(text, apart[worst], most, "a right resume leaves")}


def engine(bench: Bench) -> Figures:
    return _cycles(bench, experts=0)


def engine_of_experts(bench: Bench) -> Figures:
    return _cycles(bench, experts=128 if bench.gpu else 16)


def _cycles(bench: Bench, experts: int) -> Figures:
    """Start; greedy answers; twice sleep, reload and wake; the same answers, and no memory lost; answers scored again."""
    shape = replace(SHAPE, layers=4, ffn_size=1024) if bench.gpu else SHAPE
    config = bench.recipe(bench.model(shape, experts), "run")
    run = build_run(config, bench.grid, Path(config.run_dir))
    run.learner.start()
    begin = time.perf_counter()
    run.start_engine()
    figures: Figures = {"start s": time.perf_counter() - begin}
    before = _greedy(run)
    asleep, awake = list[float](), list[float]()
    for _ in range(2):
        run.hand_device_to_actor()
        asleep.append(_free())
        scored = run.score_by_actor()
        begin = time.perf_counter()
        run.hand_device_to_engine()
        device.synchronize()
        seconds = time.perf_counter() - begin
        awake.append(_free())
        difference = run.sync.check(scored)
        if _greedy(run) != before:
            raise Surprise("the engine's greedy answers are others after sleep, reload and wake, with the same weights")
    figures |= difference.metrics()
    most = (0.1 if experts else 0.05) if bench.gpu else 1e-5  # guessed for bf16
    figures["drawn vs scored"] = expect(
        "drawn vs scored", _redrawn(run), most, "kernels that add in another order explain"
    )
    tensors = sum(1 for _ in run.learner.actor.iter_hf_weights())
    figures |= {"tensors": float(tensors), "reload ms per tensor": 1000 * seconds / tensors}
    if bench.gpu:
        figures |= {"free GiB asleep": asleep[-1], "free GiB awake": awake[-1]}
        freed = asleep[-1] - awake[-1]
        if freed < 1:
            raise Surprise(f"sleep has given back {freed:.2f} GiB of the engine's share of the card")
        for name, free in (("asleep", asleep), ("awake", awake)):
            expect(f"memory in GiB lost per cycle, {name},", free[0] - free[1], _LEAK, "a cycle may keep")
    run.close()
    return figures


def _greedy(run: Run) -> list[tuple[int, ...]]:
    """The engine's most likely answers to the first prompts."""
    prompts = [sample.prompt_ids for sample in run.sampler.prompts.train[:8]]
    run.sampler.engine.submit([Request(("", i), ids, Sampling(0.0, 1.0, 32)) for i, ids in enumerate(prompts)])
    answers = {completion.request.name: tuple(completion.ids) for completion in drain(run.sampler.engine)}
    return [answers["", i] for i in range(len(prompts))]


def _redrawn(run: Run) -> float:
    """Mean difference of an answer's log-probs as it was drawn, a token at a time (on a GPU in CUDA graphs), and as the
    engine scores it, all at once (eagerly or compiled, without graphs of whole passes)."""
    engine = run.sampler.engine
    prompts = [list(sample.prompt_ids) for sample in run.sampler.prompts.train[:8]]
    engine.submit([Request(("", i), ids, Sampling(1.0, 1.0, 32), seed=i) for i, ids in enumerate(prompts)])
    drawn = sorted(drain(engine), key=lambda completion: completion.request.name)
    scored = engine.score([[*completion.request.tokens, *completion.ids] for completion in drawn])
    differences = [
        np.abs(whole[-len(completion.ids) :] - np.asarray(completion.logprobs))
        for whole, completion in zip(scored, drawn, strict=True)
    ]
    return float(np.concatenate(differences).mean())


def _free() -> float:
    """GiB of the card that no process holds; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] / _GIB if device.has_gpu() else 0.0


_SHOWN = {
    "sync/logprob_mean_diff": "sync mean difference",
    "sync/logprob_p99_diff": "sync 99th percentile",
    "sync/logprob_max_diff": "sync largest difference",
    "mismatch/kl_k3": "mismatch KL",
    "timing_s/generate": "generate s",
    "timing_s/update": "update s",
    "timing_s/sync": "sync s",
    "timing_s/step": "step s",
}


_BARS = "{source: bars, size: 256, demonstrations: chain_sum_steps}"  # in the place of the sums


def rl(bench: Bench) -> Figures:
    return _three_steps(bench, bench.recipe(bench.model(SHAPE), "run"))


def rl_of_images(bench: Bench) -> Figures:
    folder = bench.model(replace(SHAPE, characters="0123456789+-=# rgby", vision=CreateVisionConfig()))
    tasks = ("tasks.train.chain_sum=null", f"tasks.train.bars={_BARS}", "rollout.max_prompt_tokens=64")
    return _three_steps(bench, bench.recipe(folder, "run", *tasks))


def _three_steps(bench: Bench, config: Config) -> Figures:
    """Runs three steps of RL; the last one's metrics, and of the sync's differences the largest."""
    run = build_run(config, bench.grid, Path(config.run_dir))
    train(run, "never")
    run.close()
    bench.grid.barrier()
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "timing_s/step" in row]
    if len(rows) != config.trainer.steps:
        raise Surprise(f"{len(rows)} of {config.trainer.steps} steps are in metrics.jsonl")
    if not any(row.get("actor/grad_norm", 0.0) > 0 for row in rows):
        raise Surprise("no step had a gradient: the rewards of every group were equal")
    figures: Figures = {}
    for name, shown in _SHOWN.items():
        values = [row[name] for row in rows if name in row]
        if values:
            figures[shown] = max(values) if name.startswith("sync/") else values[-1]
    return figures | {
        name: value for name, value in rows[-1].items() if name in ("memory/device_peak_gib", "memory/host_peak_gib")
    }
