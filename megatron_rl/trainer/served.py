"""`megatron-rl evaluate --endpoint`: held-out prompts, answered by a served model. One process, no engine, no actor."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.algorithms import make_algorithm
from megatron_rl.config.schema import Config
from megatron_rl.data import Sample
from megatron_rl.evaluation import kept
from megatron_rl.evaluation.endpoint import Server, Unanswered, complete, find_server
from megatron_rl.evaluation.summary import TaskSummary, summarize
from megatron_rl.rewards import RewardError, Scorer
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime import exit_codes
from megatron_rl.runtime.distributed import Grid
from megatron_rl.runtime.http import EndpointError
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.trainer.evaluate import Responses, evaluation_seed_step, finish, take_up
from megatron_rl.trainer.prompts import load_prompts
from megatron_rl.trainer.report import Reporter

_ALONE = Grid(rank=0, world=1, tp=1, tp_rank=0, pp=1, pp_rank=0, dp=1, dp_rank=0, cp=1, cp_rank=0, host_group=None)
_SHOWN = 3  # reasons of failed requests that are printed


def evaluate_served(config: Config, urls: Sequence[str], name: str | None) -> int:
    """Asks the servers and writes what `megatron-rl evaluate` writes. Returns the exit code.

    Args:
        config: a checked recipe; `model.path` has the tokenizer of the served model.
        urls: base URLs of equal servers.
        name: the model's name there; None: the only one.
    """
    begin = time.monotonic()
    report = Reporter(config, Path(config.run_dir), _ALONE, "evaluate")
    try:
        from transformers import AutoTokenizer

        longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
        server = find_server(urls, name, config.evaluation.endpoint, longest)
        report.phase("loading the tasks")
        assert config.model.path is not None  # the command has seen to it
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        tasks = load_prompts(config, tokenizer, report.note, training=False).eval
        served = {"name": server.name, "root": server.root, "tokenizer": kept.files_of(Path(config.model.path))}
        there = take_up(report, kept.origin(config, served), [s for samples in tasks.values() for s in samples])
        report.begin("evaluation", 0, 1)
        summaries, responses, failures, counters = _answer(config, report, tokenizer, server, tasks, there)
    except (ValueError, OSError, EndpointError, RewardError) as error:
        report.close()
        print(f"megatron-rl: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT if isinstance(error, ValueError) else exit_codes.FAILED
    except KeyboardInterrupt:
        report.close()
        print("megatron-rl: stopped; the same command continues with the responses that are there", file=sys.stderr)
        return 128 + signal.SIGINT
    model = {"door": "endpoint", "urls": list(server.urls), "served_name": server.name, "tokenizer": config.model.path}
    finish(report, model, summaries, responses, counters, begin)
    if not failures:
        kept.discard(report.run_dir / kept.FOLDER)
    report.summary()
    report.close()
    return _verdict(config, failures, sum(summary.responses for summary in summaries))


def _answer(
    config: Config,
    report: Reporter,
    tokenizer: Tokenizer,
    server: Server,
    tasks: dict[str, list[Sample]],
    there: kept.Kept,
) -> tuple[list[TaskSummary], dict[str, Responses], list[Unanswered], dict[str, float]]:
    scorer = Scorer(config.rewards, make_algorithm(config.algorithm).estimator.needs.columns)
    for samples in tasks.values():
        scorer.check(samples)
        for doubt in scorer.doubts(samples):
            report.warn(doubt)
    scorer.open(report.run_dir, _ALONE.rank, _ALONE.world)
    keep = kept.Keeper(report.run_dir / kept.FOLDER / "engine0.jsonl")
    try:
        summaries, responses, failures = _answer_and_score(
            config, report, tokenizer, server, tasks, scorer, there, keep
        )
        scored = scorer.take_stats()
        report.missing_scores(scored)
        return summaries, responses, failures, scored.metrics()
    finally:
        keep.close()
        scorer.close()


def _answer_and_score(
    config: Config,
    report: Reporter,
    tokenizer: Tokenizer,
    server: Server,
    tasks: dict[str, list[Sample]],
    scorer: Scorer,
    there: kept.Kept,
    keep: kept.Keeper,
) -> tuple[list[TaskSummary], dict[str, Responses], list[Unanswered]]:
    trainer = config.trainer
    sampling = Sampling(trainer.eval_temperature, trainer.eval_top_p, config.rollout.max_tokens)
    summaries: list[TaskSummary] = []
    responses: dict[str, Responses] = {}
    failures: list[Unanswered] = []
    for task, samples in tasks.items():
        rollouts, failed = complete(
            server,
            config.evaluation.endpoint,
            samples,
            trainer.eval_rollouts,
            sampling,
            config.seed,
            evaluation_seed_step(0),
            _Counter(report, task, len(samples) * trainer.eval_rollouts),
            there,
            keep,
        )
        report.note(f"{task}: {len(rollouts)} responses, {len(failed)} requests failed")
        failures += failed
        report.phase(f"scoring {task}")
        texts = tokenizer.batch_decode(
            [rollout.response_ids for rollout in rollouts], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        by_id = {sample.id: sample for sample in samples}
        rows = scorer.score(
            texts,
            [by_id[rollout.sample_id] for rollout in rollouts],
            [rollout.finish_reason for rollout in rollouts],
            [len(rollout.response_ids) for rollout in rollouts],
        )
        for rollout, text, row in zip(rollouts, texts, rows, strict=True):
            rollout.text, rollout.rewards = text, row
        summaries.append(summarize(config, task, samples, rollouts, len(failed)))
        responses[task] = (samples, rollouts)
    return summaries, responses, failures


class _Counter:
    """Says on the terminal how many requests were answered. Called from the thread of the requests."""

    def __init__(self, report: Reporter, task: str, total: int) -> None:
        self.report, self.task, self.total = report, task, total
        self.answered = self.failed = 0

    def __call__(self, answered: bool) -> None:
        self.answered += answered
        self.failed += not answered
        self.report.phase(f"{self.task}: {self.answered} of {self.total} requests answered, {self.failed} failed")


def _verdict(config: Config, failures: Sequence[Unanswered], answered: int) -> int:
    """Failed requests are in no number; above the share that the recipe tolerates the numbers do not count either."""
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
