"""Rewards that ask a server: each question once, answers cached on disk, a budget, and a rule for unanswered questions."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from megatron_rl.config.keys import Finite
from megatron_rl.config.schema import ServerConfig
from megatron_rl.rewards.kinds import Bounds, Remark, Reward, SampleMapping, Score
from megatron_rl.runtime.calls import event_loop
from megatron_rl.runtime.disk import make_inside
from megatron_rl.runtime.http import Endpoint, EndpointError, Traffic, Unanswered

_LONGEST_KEPT_REPLY = 2000  # characters, in the file of answers


class Nonsense(ValueError):
    """A reply without a score; the text quotes it."""


Reply: TypeAlias = Mapping[str, Any]  # a server's JSON, not checked yet
Budget = Annotated[int, Field(ge=1)] | None


@dataclass(frozen=True)
class AnswerRules:
    """A recipe's settings of a reward that asks a server.

    Attributes:
        unanswered: how a rollout without an answer is scored. `drop`: this reward has no value for it, and the estimator
            uses the others; `neutral`: it scores `neutral`; `stop`: the run stops.
        neutral: the score under `neutral`.
        step_seconds: how long a step waits for answers after its last rollout has ended.
        max_requests_per_run: HTTP requests of all ranks, retries and earlier attempts included; None: no limit.
        max_tokens_per_run: tokens read and written, as the server reports them.
    """

    unanswered: Literal["drop", "neutral", "stop"] = "drop"
    neutral: Finite = 0.5
    step_seconds: Annotated[float, Field(ge=0.1)] = 600.0
    max_requests_per_run: Budget = None
    max_tokens_per_run: Budget = None

    def __post_init__(self) -> None:
        if self.unanswered != "neutral" and self.neutral != type(self).neutral:
            raise ValueError(
                f"neutral = {self.neutral:g} does nothing with unanswered: {self.unanswered}; set unanswered: neutral, or "
                "leave it out"
            )


@dataclass
class Counts:
    """Events since the counts were last taken.

    Attributes:
        scored: rollouts that were to be scored.
        cache_hits: of them, those whose question was asked before: in this step, this run, or before a restart.
        no_score: of them, those without a score, by reason. `nonsense`: the reply held no score; `refused`: the server
            refused the request as it is, for example as too long; `failed`: no reply, after all retries; `expired`: the
            step's deadline came first; `budget`: the budget was used up.
        example: what happened to one of them.
    """

    scored: int = 0
    cache_hits: int = 0
    no_score: Counter[str] = field(default_factory=Counter)
    example: str = ""
    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Counts:
        """Undoes `plain`."""
        traffic, no_score = Traffic(**plain["traffic"]), Counter[str](plain["no_score"])
        return cls(plain["scored"], plain["cache_hits"], no_score, plain["example"], traffic)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        counts = {"scored": self.scored, "cache_hits": self.cache_hits, "no_score": dict(self.no_score)}
        return counts | {"example": self.example, "traffic": asdict(self.traffic)}

    def __iadd__(self, other: Counts) -> Counts:
        self.scored += other.scored
        self.cache_hits += other.cache_hits
        self.no_score += other.no_score
        self.example = self.example or other.example
        self.traffic += other.traffic
        return self

    def metrics(self, column: str) -> dict[str, float]:
        metrics = {
            f"{column}/scored": float(self.scored),
            f"{column}/cache_hits": float(self.cache_hits),
            f"{column}/no_score": float(self.no_score.total()),
            f"{column}/retries": float(self.traffic.retries),
            f"{column}/tokens": float(self.traffic.tokens),
        }
        if self.traffic.latencies:
            import numpy as np

            metrics[f"{column}/latency_p95"] = float(np.quantile(self.traffic.latencies, 0.95))
        return metrics

    def details(self) -> dict[str, object]:
        """Every count, for the file of answers."""
        details = asdict(self.traffic) | {"scored": self.scored, "cache_hits": self.cache_hits}
        if latencies := details.pop("latencies"):
            details |= {"latency_mean": sum(latencies) / len(latencies), "latency_max": max(latencies)}
        return details | {"tokens": self.traffic.tokens, "no_score": dict(self.no_score)}


@dataclass(frozen=True, slots=True)  # one is kept for every question of the run
class Verdict:
    """The outcome of one question; `kind` and `reason` say why there is no score. The words are in a file of answers."""

    score: Score
    kind: str = ""  # nonsense | expired | budget | failed | refused
    reason: str = ""
    rank: int = 0  # whose file
    offset: int = -1  # of the line in it, in bytes; -1: it is in none


class RemoteReward(Reward):
    """A reward that is the reply of a server. Safe to use from several threads.

    Attributes:
        remembers: answers are kept, for equal questions and for a resumed run.

    Args:
        urls: base URL, or several of equal servers.
        server: how they are asked.
        rules: what the recipe decides.
        path: what is posted to, below the base URL.
        render: completion and sample to the request's JSON body.
        read: the reply's JSON, and the request's, to a score and the text to keep; raises Nonsense.
        is_reply: whether a reply's JSON is one that can be read; the request is sent again where it is not.
        bounds: of the scores that `read` gives. The rollouts' have those of `neutral` too, where that is a score.
    """

    remembers = True

    def __init__(
        self,
        urls: str | Sequence[str],
        server: ServerConfig,
        rules: AnswerRules,
        path: str,
        render: Callable[[str, SampleMapping], dict[str, object]],
        read: Callable[[Reply, Mapping[str, Any]], tuple[Score, str]],
        is_reply: Callable[[Reply], bool],
        bounds: Bounds,
    ) -> None:
        given = (rules.neutral,) if rules.unanswered == "neutral" else ()
        super().__init__(
            lambda completion, sample: self.submit(completion, sample).result(),
            bounds=(min(bounds[0], *given), max(bounds[1], *given)) if given else bounds,
            may_abstain=rules.unanswered == "drop",
            remarks=self._words,
        )
        self.rules = rules
        self._render = render
        self._endpoint = Endpoint(urls, server, self._check_budget, is_reply)
        self._path, self._read = path, read
        self._counts = Counts()
        self._rank, self._world, self._step = 0, 1, 0
        self._cache: dict[str, Verdict] = {}
        self._news: dict[str, Verdict] = {}
        self._asking: dict[str, asyncio.Task[Verdict]] = {}
        self._file: Path | None = None
        self._spent_before = (0, 0)  # requests and tokens of the run so far, over all ranks

    # ------------------------------------------------------------------------------------------------------- scoring
    def submit(self, completion: str, sample: SampleMapping) -> Future[Score]:
        """Starts to score; the future has the score, or None without an answer, where the rule is `drop`.

        The future raises:
            EndpointError: the rule is `stop`, or the endpoint was never usable.
        """
        return asyncio.run_coroutine_threadsafe(self._score(completion, {**sample}), event_loop())

    def ask(self, body: Mapping[str, object]) -> Reply:
        """The reply to one request that scores nothing. Raises Unanswered and EndpointError."""
        return asyncio.run_coroutine_threadsafe(self._endpoint.post(self._path, body), event_loop()).result()

    async def _score(self, completion: str, sample: SampleMapping) -> Score:
        body = self._render(completion, sample)
        key = self._key(body)
        self._counts.scored += 1
        if key in self._cache:
            self._counts.cache_hits += 1
            verdict = self._cache[key]
        else:
            task = self._asking.get(key)
            self._counts.cache_hits += task is not None
            if task is None:
                task = self._asking[key] = asyncio.get_running_loop().create_task(self._ask(key, body))
                task.add_done_callback(lambda _: self._asking.pop(key, None))
            try:
                verdict = await asyncio.shield(task)
            except asyncio.CancelledError:
                if not task.cancelled():
                    raise
                verdict = Verdict(None, "expired", f"no answer {self.rules.step_seconds:g} s after the last rollout")
        return self._by_rule(verdict)

    def _key(self, body: Mapping[str, object]) -> str:
        return hashlib.blake2b(json.dumps([self._path, body], sort_keys=True).encode(), digest_size=16).hexdigest()

    def _words(self, completion: str, sample: SampleMapping) -> list[Remark]:
        """The server's words on a rollout, as far as the file of answers has it."""
        verdict = self._cache.get(self._key(self._render(completion, sample)))
        if verdict is None or verdict.offset < 0 or self._file is None:
            return []
        path = self._file.with_name(f"rank{verdict.rank}.jsonl")
        try:
            with path.open("rb") as file:
                file.seek(verdict.offset)
                words = json.loads(file.readline())["reply"]
        except (OSError, ValueError) as error:  # another node's file, which is not seen here yet
            words = f"[the reply cannot be read from {path.name}: {error}]"
        return [(words, None)] if words else []

    def _by_rule(self, verdict: Verdict) -> Score:
        if verdict.score is not None:
            return verdict.score
        self._counts.no_score[verdict.kind] += 1
        self._counts.example = self._counts.example or verdict.reason
        if self.rules.unanswered == "stop":
            raise EndpointError(f"no score from {', '.join(self._endpoint.urls)}: {verdict.reason}")
        return self.rules.neutral if self.rules.unanswered == "neutral" else None

    async def _ask(self, key: str, body: Mapping[str, object]) -> Verdict:
        text = ""
        try:
            reply = await self._endpoint.post(self._path, body)
            try:
                score, text = self._read(reply, body)
                kind = reason = ""
            except Nonsense as error:
                score, text = None, str(error)
                kind, reason = "nonsense", f"the reply holds no score: {text[:200]!r}"
        except Unanswered as error:
            return Verdict(None, error.kind, str(error))
        if not self.remembers:
            return Verdict(score, kind, reason)
        # Scores and nonsense are kept, so that a resumed run sees the same; a failed request is sent again.
        offset = self._append(json.dumps({"key": key, "score": score, "reply": text[:_LONGEST_KEPT_REPLY]}) + "\n")
        verdict = Verdict(score, kind, reason, self._rank, offset)
        self._cache[key] = self._news[key] = verdict
        return verdict

    def expire(self) -> None:
        """Cancels all open questions: they are unanswered."""

        def cancel() -> None:
            for task in list(self._asking.values()):
                task.cancel()

        event_loop().call_soon_threadsafe(cancel)

    # -------------------------------------------------------------------------------------------------------- budget
    def _check_budget(self) -> None:
        """Raises Unanswered where this rank's part of a budget is used up."""
        rules, traffic = self.rules, self._endpoint.traffic  # since the counts were taken
        requests, tokens = self._spent_before
        for name, budget, spent, before in (
            ("requests", rules.max_requests_per_run, traffic.requests, requests),
            ("tokens", rules.max_tokens_per_run, traffic.tokens, tokens),
        ):
            if budget is not None and spent >= self._part(max(0, budget - before)):
                raise Unanswered(f"max_{name}_per_run = {budget} is used up", "budget")

    def _part(self, budget: int) -> int:
        """This rank's part of a budget; the parts add up to it."""
        return budget // self._world + (self._rank < budget % self._world)

    def begin_step(self, step: int) -> None:
        """The step that the following counts belong to."""
        self._step = step

    # ----------------------------------------------------------------------------------------- one reward, many ranks
    def open(self, folder: Path, rank: int, world: int) -> None:
        """Keeps answers under `folder`, one file per rank, and loads those of earlier attempts.

        Each of `world` processes gets its part of `max_in_flight` and of the budgets.
        """
        self._rank, self._world = rank, world
        self._endpoint.share(world)
        spent = [0, 0]
        for path in sorted(folder.glob("rank*.jsonl")):
            end = 0
            for line in path.read_bytes().splitlines(keepends=True):
                offset, end = end, end + len(line)
                try:
                    row = json.loads(line)
                except ValueError:  # a killed process's last line
                    continue
                if "key" in row:
                    kind = "" if row["score"] is not None else "nonsense"
                    reason = f"the reply held no score: {row['reply'][:200]!r}"
                    asked_by = int(path.stem.removeprefix("rank"))
                    self._cache[row["key"]] = Verdict(row["score"], kind, reason, asked_by, offset)
                spent[0] += row.get("requests", 0)
                spent[1] += row.get("tokens", 0)
        self._spent_before = (spent[0], spent[1])
        make_inside(folder.parent.parent, folder)  # <run_dir>/answers/<name>
        self._file = folder / f"rank{rank}.jsonl"
        if self._file.exists() and not self._file.read_bytes().endswith(b"\n"):
            self._append("\n")

    def _append(self, text: str) -> int:
        """Where in the file the text begins, in bytes; -1 without a file."""
        if self._file is None:
            return -1
        with self._file.open("ab") as file:
            offset = file.tell()
            file.write(text.encode())
        return offset

    def take_counts(self) -> tuple[Counts, dict[str, Verdict]]:
        """Counts and new answers since the last call, for `learn` on every rank. No question may be open."""
        counts, self._counts = self._counts, Counts()
        counts.traffic = self._endpoint.take_traffic()
        if counts.scored:
            self._append(json.dumps({"step": self._step, **counts.details()}) + "\n")
        news, self._news = self._news, {}
        return counts, news

    def learn(self, counts: Counts, answers: Mapping[str, Verdict]) -> None:
        """Adds what a rank has asked and spent since it was last told."""
        self._cache.update(answers)
        requests, tokens = self._spent_before
        self._spent_before = (requests + counts.traffic.requests, tokens + counts.traffic.tokens)

    def close(self) -> None:
        """Ends open questions and connections."""
        self.expire()
        asyncio.run_coroutine_threadsafe(self._endpoint.close(), event_loop()).result(timeout=10)
