"""Slow rewards started early, servers that do not answer, and what becomes of a missing score in a row."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.schema import ConditionConfig, RewardConfig
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.rewards import RewardError, Scorer, kinds
from megatron_rl.rewards.remote import Counts
from megatron_rl.rewards.score_checks import ScoringStats
from megatron_rl.runtime.calls import CallPool

from .chat_server import serving

OWN = """
import threading
import time

def slow(seconds=0.02):
    def score(completion, sample):
        time.sleep(seconds)
        return float(len(completion))
    score.concurrent = True
    return score

def hangs(seconds=None):
    def score(completion, sample):
        if "hang" in completion:
            threading.Event().wait()
        return {"length": float(len(completion))}
    score.concurrent, score.columns = True, ("length",)
    if seconds is not None:
        score.timeout_seconds = seconds
    return score

def fails():
    def score(completion, sample):
        raise TimeoutError("of its own")
    score.concurrent = True
    return score

def good():
    return lambda completion, sample: float("good" in completion)

def text():
    return lambda completion, sample: completion[0]

def surprise():
    def score(completion, sample):
        assert sample["token_ids"][sample["loss_mask"]].size == sample["logprobs"].size
        return None if completion == "silent" else [1.0] if completion == "short" else -sample["logprobs"]
    score.per_token, score.may_abstain = True, True
    return score

def per_prompt():
    def score(completion, sample):
        return [1.0] * (len(completion) if completion == "short" else sample["num_tokens"])
    score.per_token = score.concurrent = True
    return score

def beyond_float32():
    score = lambda completion, sample: [1e39] * sample["num_tokens"]
    score.per_token = True
    return score

def beyond_float64():
    score = lambda completion, sample: [10**400] * sample["num_tokens"]
    score.per_token = True
    return score

def forgets():
    return lambda completion, sample: None
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def sample(index: int = 0, task: str = "t") -> Sample:
    return Sample(id=f"{task}/{index}", task=task, prompt=f"p{index}", prompt_ids=[1])


def judge(url: str, **params: Any) -> dict[str, Any]:
    params = {"urls": url, "model": "m", "backoff_seconds": 0.01, **params}
    return {"reward": "judge", "params": params}


def test_what_a_reward_needs_of_the_data_is_looked_for_before_the_run() -> None:
    rewards = {
        "right": RewardConfig(reward="math", params={"gold_after": "####"}, tasks=["sums"]),
        "passed": RewardConfig(reward="code_pass_rate", tasks=["code"]),
    }
    good = [
        Sample(id="sums/0", task="sums", prompt="", prompt_ids=[1], answer="so\n#### 7"),
        Sample(id="code/0", task="code", prompt="", prompt_ids=[1], answer='{"inputs": ["1"], "outputs": ["1"]}'),
        Sample(id="other/0", task="other", prompt="", prompt_ids=[1]),
    ]
    scorer = Scorer(rewards)
    scorer.check(good)
    for task, answer, message in (
        ("sums", None, "needs the sample's answer"),
        ("sums", "7", "gold_after"),
        ("code", "{", "JSON"),
    ):
        bad = Sample(id=f"{task}/1", task=task, prompt="", prompt_ids=[1], answer=answer)
        with pytest.raises(ValueError, match=f"cannot score sample {task}/1: .*{message}"):
            scorer.check([*good, bad])


def test_starting_early_changes_nothing_but_the_wait(own: str) -> None:
    rewards = {"cheap": RewardConfig(reward=f"{own}:good"), "slow": RewardConfig(reward=f"{own}:slow")}
    texts = ["good" * i for i in range(30)]
    samples = [sample(i) for i in range(30)]
    late = Scorer(rewards)
    expected = late.score(texts, samples)
    assert late.take_stats().early == 0
    early = Scorer(rewards)
    for i in reversed(range(30)):  # rollouts end in any order
        early.start(("key", i), texts[i], samples[i])
    wait([future for one in early._open.values() for future in one.futures.values()], timeout=60)
    assert early.score(texts, samples, keys=[("key", i) for i in range(30)]) == expected
    stats = early.take_stats()
    assert (stats.started, stats.early) == (30, 30)


def test_some_started_and_some_not(own: str) -> None:
    scorer = Scorer({"slow": RewardConfig(reward=f"{own}:slow")})
    scorer.start(1, "abc", sample(1))
    rows = scorer.score(["ab", "abc", "abcd"], [sample(i) for i in range(3)], keys=[0, 1, 2])
    assert [row["slow"] for row in rows] == [2, 3, 4]


def drawn(index: int, logprobs: list[float]) -> Rollout:
    return Rollout.single_turn(sample(index), 0, range(len(logprobs)), "stop", logprobs)


def test_a_reward_per_token_scores_the_rollouts_of_training_and_no_others(own: str) -> None:
    rewards = {
        "good": RewardConfig(reward=f"{own}:good"),
        "gated": RewardConfig(
            reward=f"{own}:per_prompt", weight=0.5, condition=ConditionConfig(column="good", at_least=1)
        ),
        "surprise": RewardConfig(reward=f"{own}:surprise", weight=2.0, tasks=["t"]),
    }
    scorer = Scorer(rewards)
    assert (scorer.columns, scorer.token_weights) == (("good",), {"gated": 0.5, "surprise": 2.0})
    texts, samples = ["good", "bad", "silent", "good"], [sample(0), sample(1), sample(2), sample(3, "other")]
    rollouts = [drawn(0, [-1.0, -2.0]), drawn(1, [-4.0]), drawn(2, [-1.0]), drawn(3, [-1.0, -1.0])]
    scorer.start(1, texts[0], samples[0], "stop", 2, rollouts[0])
    rows = scorer.score(texts, samples, ["stop"] * 4, [2, 1, 1, 2], [1, 2, 3, 4], rollouts)
    assert rows[0] == {"good": 1.0, "gated": 1.0, "surprise": 1.5}
    assert rows[1] == {"good": 0.0, "gated": 0.0, "surprise": 4.0}
    assert math.isnan(rows[2]["surprise"])
    assert rows[3]["surprise"] == 0.0, "it is not of this task"
    token_rewards = [rollout.token_rewards.tolist() for rollout in rollouts if rollout.token_rewards is not None]
    assert token_rewards[:2] == [[[1.0, 1.0], [1.0, 2.0]], [[0.0, 4.0]]]
    assert token_rewards[3] == [[1.0, 0.0], [1.0, 0.0]]
    assert scorer.score(texts, samples) == [{"good": value} for value in (1.0, 0.0, 0.0, 1.0)]


def test_a_gate_that_fails_decides_also_where_a_reward_per_token_has_no_value(own: str) -> None:
    gate = ConditionConfig(column="good", at_least=1)
    surprise = RewardConfig(reward=f"{own}:surprise", condition=gate)
    rollout = drawn(0, [-1.0, -2.0])
    rewards = {"good": RewardConfig(reward=f"{own}:good"), "surprise": surprise}
    [row] = Scorer(rewards).score(["silent"], [sample()], ["stop"], [2], rollouts=[rollout])
    assert row["surprise"] == 0.0
    assert rollout.token_rewards is not None
    assert rollout.token_rewards.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("reward", ["surprise", "per_prompt", "beyond_float64"])
def test_a_reward_per_token_returns_a_number_for_each(own: str, reward: str) -> None:
    scorer = Scorer({"dense": RewardConfig(reward=f"{own}:{reward}")})
    with pytest.raises(RewardError, match=r"'dense' .*sample t/0.* 2 response tokens"):
        scorer.score(["short"], [sample()], ["stop"], [2], rollouts=[drawn(0, [-1.0, -1.0])])


def test_a_reward_per_token_is_finite_in_the_precision_of_the_advantages(own: str) -> None:
    scorer = Scorer({"dense": RewardConfig(reward=f"{own}:beyond_float32")})
    with pytest.raises(RewardError, match=r"'dense' is .*1e\+39.* for token 0 .* sample t/0, not a finite number"):
        scorer.score(["long"], [sample()], ["stop"], [2], rollouts=[drawn(0, [-1.0, -1.0])])


def test_a_reward_per_token_is_no_gate_and_no_column_of_an_estimator(own: str) -> None:
    dense = RewardConfig(reward=f"{own}:surprise")
    gated = RewardConfig(reward=f"{own}:good", condition=ConditionConfig(column="dense", at_least=0))
    with pytest.raises(ValueError, match="'dense' has one number per token; a condition needs one per rollout"):
        Scorer({"dense": dense, "gated": gated})
    with pytest.raises(ValueError, match=r"rewards\.dense has a number per token; the estimator needs one per rollout"):
        Scorer({"dense": dense}, ["dense"])


def test_a_missing_score_is_nan_and_a_gate_without_value_decides_nothing(own: str) -> None:
    def behave(_: int, body: dict[str, Any]) -> str:
        return "text:?" if "silent" in body["messages"][-1]["content"] else "score:1.0"

    with serving(behave) as server:
        rewards = {
            "judge": RewardConfig(**judge(server.url)),
            "size": RewardConfig(reward=f"{own}:slow", condition=ConditionConfig(column="judge", at_least=0.9)),
        }
        scorer = Scorer(rewards)
        first, second = scorer.score(["loud", "silent"], [sample(), sample()])
    assert first == {"judge": 1.0, "size": 4.0}
    assert math.isnan(second["judge"])
    assert math.isnan(second["size"])
    counts, _ = scorer.take_stats().remote["judge"]
    assert (counts.scored, counts.no_score) == (2, {"nonsense": 1})


def test_a_judge_is_not_asked_where_its_condition_fails_or_its_task_is_another(own: str) -> None:
    with serving("score:0.5") as server:
        rewards = {
            "judge": RewardConfig(**judge(server.url), tasks=["t"], condition=ConditionConfig(column="good")),
            "good": RewardConfig(reward=f"{own}:good"),
        }
        rows = Scorer(rewards).score(["good", "bad", "good"], [sample(), sample(), sample(task="u")])
        assert [row["judge"] for row in rows] == [0.5, 0.0, 0.0]
        assert [row["good"] for row in rows] == [1.0, 0.0, 1.0]
        assert len(server.requests) == 1


def test_a_judge_that_gates_another_reward_is_always_asked(own: str) -> None:
    with serving("score:1.0") as server:
        rewards = {
            "judge": RewardConfig(**judge(server.url), condition=ConditionConfig(column="good")),
            "good": RewardConfig(reward=f"{own}:good"),
            "size": RewardConfig(reward=f"{own}:slow", condition=ConditionConfig(column="judge")),
        }
        assert Scorer(rewards).score(["bad"], [sample()]) == [{"judge": 0.0, "good": 0.0, "size": 3.0}]
        assert len(server.requests) == 1


def test_the_deadline_runs_from_the_last_rollout(own: str) -> None:
    with serving("hang") as server:
        scorer = Scorer({"judge": RewardConfig(**judge(server.url, step_seconds=1.0))})
        scorer.start(0, "a", sample())
        time.sleep(1.5)  # generation goes on: the question stays open
        (future,) = scorer._open[0].futures.values()
        assert not future.done()
        began = time.monotonic()
        (row,) = scorer.score(["a"], [sample()], keys=[0])
        assert math.isnan(row["judge"])
        assert 0.9 < time.monotonic() - began < 20
        counts, _ = scorer.take_stats().remote["judge"]
        assert counts.no_score == {"expired": 1}
        assert counts.example == "no answer 1 s after the last rollout"


def test_the_first_rollout_without_a_score_is_the_example() -> None:
    with serving(lambda number, _: f"text:{'abc'[number]}") as server:
        scorer = Scorer({"judge": RewardConfig(**judge(server.url))})
        for texts, first in (("xy", "a"), ("z", "c")):
            for text in texts:
                scorer.score([text], [sample()])
            assert scorer.take_stats().remote["judge"][0].example == f"the reply holds no score: '{first}'"
        scorer.close()


def test_a_judge_with_the_rule_stop_names_sample_and_endpoint() -> None:
    with serving("status:503") as server:
        scorer = Scorer({"judge": RewardConfig(**judge(server.url, unanswered="stop", retries=0))})
        with pytest.raises(RewardError, match=rf"'judge' failed on sample t/7: .*{server.url}.*HTTP 503"):
            scorer.score(["a"], [sample(7)])


def test_a_call_that_hangs_is_given_up_counted_and_in_nobodys_way(own: str) -> None:
    rewards = {
        "remote": RewardConfig(reward=f"{own}:hangs", params={"seconds": 0.5}),
        "slow": RewardConfig(reward=f"{own}:slow"),
    }
    scorer = Scorer(rewards)
    texts = ["hang", "ab", "hang?", "hang!", "abc"]
    scorer.start(0, texts[0], sample(0))
    rows = scorer.score(texts, [sample(i) for i in range(5)], keys=range(5))
    assert [row["slow"] for row in rows] == [4, 2, 5, 5, 3]
    assert [rows[i]["remote.length"] for i in (1, 4)] == [2, 3]
    assert all(math.isnan(rows[i]["remote.length"]) for i in (0, 2, 3))
    assert scorer.take_stats().timeouts == {"remote": 3, "slow": 0}
    assert scorer.score(["ok"], [sample()]) == [{"remote.length": 2, "slow": 2}], "the threads that hang hold no slot"
    assert scorer.take_stats().timeouts == {"remote": 0, "slow": 0}


def test_threads_that_hang_do_not_keep_the_process(own: str) -> None:
    program = f"""
from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.sample import Sample
from megatron_rl.rewards import Scorer
scorer = Scorer({{"x": RewardConfig(reward="{own}:hangs", params={{"seconds": 0.1}})}})
print(scorer.score(["hang"], [Sample(id="a", task="t", prompt="p", prompt_ids=[1])]))
scorer.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[{'x.length': nan}]\n", "")


def test_an_error_of_a_concurrent_reward_is_its_own_and_a_bad_deadline_is_refused(own: str) -> None:
    rewards = {"slow": RewardConfig(reward=f"{own}:slow"), "x": RewardConfig(reward=f"{own}:fails")}
    with pytest.raises(RewardError, match="'x' failed on sample t/3: TimeoutError: of its own"):
        Scorer(rewards).score(["a"], [sample(3)])
    with pytest.raises(ValueError, match="timeout_seconds = 0, must be a number"):
        Scorer({"x": RewardConfig(reward=f"{own}:hangs", params={"seconds": 0})})


def test_a_reward_that_forgets_to_return_is_a_mistake(own: str) -> None:
    with pytest.raises(RewardError, match="'x' is None on sample t/0"):
        Scorer({"x": RewardConfig(reward=f"{own}:forgets")}).score(["a"], [sample()])


def test_counts_of_several_ranks_add_up() -> None:
    first = ScoringStats({"a": 1}, {"judge": (Counts(scored=2, cache_hits=1, example="x"), {"k": 1})}, 4, 1)
    second = ScoringStats({"a": 2, "b": 5}, {"judge": (Counts(scored=3, example="y"), {}), "rm": (Counts(7), {})}, 6, 2)
    first.remote["judge"][0].no_score["failed"] = second.remote["judge"][0].no_score["failed"] = 2
    second.remote["judge"][0].traffic.latencies += [0.5, 1.0]
    total = ScoringStats()
    total += first
    total += second
    assert total.timeouts == {"a": 3, "b": 5}
    assert {name: (counts.scored, answers) for name, (counts, answers) in total.remote.items()} == {
        "judge": (5, {}),
        "rm": (7, {}),
    }
    counts, _ = total.remote["judge"]
    assert (counts.cache_hits, counts.no_score, counts.example) == (1, {"failed": 4}, "x")
    assert first.remote["judge"][0].scored == 2, "a rank's own counts stay what they are"
    metrics = total.metrics()
    assert metrics["reward_overlap/share"] == 0.3
    assert (metrics["reward_timeouts/a"], metrics["reward_timeouts/b"]) == (3, 5)
    assert (metrics["judge/scored"], metrics["judge/no_score"], metrics["rm/scored"]) == (5, 4, 7)
    assert metrics["judge/latency_p95"] == pytest.approx(0.975)
    assert "rm/latency_p95" not in metrics
    assert "reward_overlap/share" not in ScoringStats(early=1).metrics()


def test_an_error_drops_what_has_not_begun_and_so_does_closing(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "call_pool", functools.cache(lambda: CallPool(1)))
    rewards = {
        "slow": RewardConfig(reward=f"{own}:slow", params={"seconds": 0.3}),
        "x": RewardConfig(reward=f"{own}:text"),
    }
    scorer = Scorer(rewards)
    for key in range(4):
        scorer.start(key, "abc", sample(key))
    futures = [one.futures["slow"] for one in scorer._open.values()]
    with pytest.raises(RewardError, match="'x' is 'a' on sample t/0"):
        scorer.score(["abc"] * 3, [sample(key) for key in range(3)], keys=range(3))
    assert [future.cancelled() for future in futures[1:]] == [True, True, False]
    scorer.close()
    assert futures[3].cancelled()


def test_two_ranks_share_answers_and_restart_from_the_folder(tmp_path: Path) -> None:
    with serving("score:0.25") as server:

        def start() -> list[Scorer]:
            scorers = [Scorer({"grade": RewardConfig(**judge(server.url))}) for _ in range(2)]
            for rank, scorer in enumerate(scorers):
                scorer.open(tmp_path, rank, 2)
            return scorers

        scorers = start()
        scorers[0].score(["a"], [sample()])
        reports = [scorer.take_stats() for scorer in scorers]
        for scorer in scorers:
            for report in reports:
                scorer.learn(report)
        assert scorers[1].score(["a"], [sample()]) == [{"grade": 0.25}]
        assert start()[1].score(["a"], [sample()]) == [{"grade": 0.25}]
        assert len(server.requests) == 1
        assert (tmp_path / "answers" / "grade" / "rank0.jsonl").exists()
        for scorer in scorers:
            scorer.close()
