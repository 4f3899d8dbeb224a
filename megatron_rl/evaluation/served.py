"""`megatron-rl evaluate --endpoint`: held-out prompts, answered by a served model. One process, no engine, no actor."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_rl.config.algorithm_checks import reward_columns
from megatron_rl.config.schema import Config
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.evaluation import response_log as kept
from megatron_rl.evaluation.endpoint import FailedRequest, Server, complete, find_server
from megatron_rl.evaluation.run import Log, answer_tasks, resume_responses, seed_step, write_evaluation
from megatron_rl.rewards import RewardError, Scorer
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime import exit_codes
from megatron_rl.runtime.http import EndpointError
from megatron_rl.tasks.loading import load_prompts

_SHOWN = 3  # reasons of failed requests that are printed


def evaluate_served(log: Log, urls: Sequence[str], name: str | None) -> int:
    """Evaluates the served model and returns the exit code; `model.path` has its tokenizer.

    Args:
        urls: base URLs of equal servers.
        name: the model's name there; None: the only one.
    """
    return guarded(log, lambda: _verdict(log.config, *_evaluate(log, urls, name)))


def guarded(log: Log, evaluate: Callable[[], int]) -> int:
    """The exit code of an evaluation, or of what ended it, which is told."""
    try:
        code = evaluate()
    except np.linalg.LinAlgError:  # a ValueError, and no recipe's fault: the traceback says more
        log.close()
        raise
    except (ValueError, OSError, EndpointError, RewardError) as error:
        log.close()
        print(f"megatron-rl: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT if isinstance(error, ValueError) else exit_codes.FAILED
    except KeyboardInterrupt:
        log.close()
        print("megatron-rl: stopped; the same command continues with the responses that are there", file=sys.stderr)
        return 128 + signal.SIGINT
    log.summary()
    log.close()
    return code


def _evaluate(log: Log, urls: Sequence[str], name: str | None) -> tuple[list[FailedRequest], int]:
    """The requests that failed, and how many were answered."""
    from transformers import AutoTokenizer

    began, config = time.monotonic(), log.config
    longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
    server = find_server(urls, name, config.evaluation.endpoint, longest)
    log.phase("loading the tasks")
    assert config.model.path is not None  # checked by the command
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=False)
    tasks = load_prompts(config, tokenizer, log.note, training=False).eval
    served = {"name": server.name, "root": server.root, "tokenizer": kept.files_of(Path(config.model.path))}
    drawn = resume_responses(log, served, tasks)
    log.begin("evaluation", 0, 1)
    scorer = Scorer(config.rewards, reward_columns(config))
    for samples in tasks.values():
        scorer.check(samples)
        for doubt in scorer.doubts(samples):
            log.warn(doubt)
    scorer.open(log.run_dir, rank=0, world=1)
    keep = kept.Keeper(log.run_dir / kept.FOLDER / "engine0.jsonl")
    failures: list[FailedRequest] = []

    def answer(task: str, samples: Sequence[Sample]) -> tuple[Sequence[Rollout], Sequence[Rollout], int]:
        rollouts, failed = _complete(log, server, task, samples, drawn, keep)
        log.note(f"{task}: {len(rollouts)} responses, {len(failed)} requests failed")
        failures.extend(failed)
        log.phase(f"scoring {task}")
        _score(scorer, tokenizer, samples, rollouts)
        return rollouts, rollouts, len(failed)

    try:
        answers = answer_tasks(config, tasks, answer)
        stats = scorer.take_stats()
        log.missing_scores(stats)
    finally:
        keep.close()
        scorer.close()
    model = {"door": "endpoint", "urls": list(server.urls), "served_name": server.name, "tokenizer": config.model.path}
    write_evaluation(log, model, answers, stats.metrics(), began)
    if not failures:
        kept.discard(log.run_dir / kept.FOLDER)
    return failures, sum(summary.responses for summary in answers.summaries)


def _complete(
    log: Log, server: Server, task: str, samples: Sequence[Sample], drawn: kept.Kept, keep: kept.Keeper
) -> tuple[list[Rollout], list[FailedRequest]]:
    config, trainer = log.config, log.config.trainer
    total, counts = len(samples) * trainer.eval_rollouts, Counter[bool]()

    def count(answered: bool) -> None:  # called from the thread of the requests
        counts[answered] += 1
        log.phase(f"{task}: {counts[True]} of {total} requests answered, {counts[False]} failed")

    sampling = Sampling(trainer.eval_temperature, trainer.eval_top_p, config.rollout.max_tokens)
    drawing = trainer.eval_rollouts, sampling, config.seed, seed_step(0)
    return complete(server, config.evaluation.endpoint, samples, *drawing, count, drawn, keep)


def _score(scorer: Scorer, tokenizer: Tokenizer, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> None:
    """Fills in the texts and rewards of rollouts."""
    ids = [rollout.response_ids for rollout in rollouts]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    by_id = {sample.id: sample for sample in samples}
    rows = scorer.score(
        texts,
        [by_id[rollout.sample_id] for rollout in rollouts],
        [rollout.finish_reason for rollout in rollouts],
        [len(tokens) for tokens in ids],
    )
    for rollout, text, row in zip(rollouts, texts, rows, strict=True):
        rollout.text, rollout.rewards = text, row


def _verdict(config: Config, failures: Sequence[FailedRequest], answered: int) -> int:
    """Reports failed requests, which no metric includes; more than the recipe tolerates make the command fail."""
    if not failures:
        return exit_codes.OK
    share, allowed = len(failures) / (len(failures) + answered), config.evaluation.endpoint.max_failed_share
    reasons = Counter(failure.reason for failure in failures).most_common(_SHOWN)
    shown = "; ".join(f"{count} x {reason}" for reason, count in reasons)
    print(
        f"megatron-rl: {len(failures)} requests ({share:.1%}) stayed unanswered and are in none of the numbers: {shown}"
        + (f" (more than evaluation.endpoint.max_failed_share = {allowed:g})" if share > allowed else "")
        + "; the same command asks for these again, and for no others",
        file=sys.stderr,
    )
    return exit_codes.FAILED if share > allowed else exit_codes.OK
