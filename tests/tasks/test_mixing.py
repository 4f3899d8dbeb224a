"""Held-out splits and mixing by weight: disjoint, deterministic, resumable, in exact proportion."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.schema import Config, TaskConfig, TasksConfig
from megatron_rl.tasks import MixedOrder, PromptOrder, check_tasks, load_tasks, make_order, tasks_to_evaluate
from megatron_rl.tasks.loading import load_prompts
from megatron_rl.tasks.order import WINDOW, window_counts

WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.1, 0.25, 1, 2.5, 7, 1 / 3]), min_size=1)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 5), st.lists(st.integers(0, 40), max_size=5), st.integers(0, 3000))
def test_any_way_of_taking_gives_the_same_sequence(
    weights: dict[str, float], seed: int, counts: list[int], start: int
) -> None:
    tasks = [name for name in weights for _ in range(3)]
    whole = MixedOrder(tasks, weights, seed).take(start, sum(counts))
    parts: list[int] = []
    order = MixedOrder(tasks, weights, seed)
    for count in counts:
        parts += order.take(start + len(parts), count)
    assert parts == whole


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 2000), st.integers(1, 400))
@example({"d": 7, "a": 1, "b": 1, "c": 1}, 3, 3)
def test_every_stretch_has_the_weights_share_of_each_task(weights: dict[str, float], start: int, length: int) -> None:
    tasks = list(weights)
    taken = Counter(tasks[i] for i in MixedOrder(tasks, weights, 0).take(start, length))
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(taken[name] - share * length) < 2 + length / WINDOW


def test_shares_are_exact_where_they_fit_a_window_and_no_task_is_lost() -> None:
    assert window_counts({"a": 1, "b": 2}) == {"a": 1, "b": 2}
    assert window_counts({"a": 0.7, "b": 0.2, "c": 0.1}) == {"a": 7, "b": 2, "c": 1}
    rare = window_counts({"a": 1e6, "b": 1e-6})
    assert rare["b"] == 1
    assert sum(window_counts({"a": 0.123456, "b": 1.0, "c": 3.14159}).values()) == WINDOW


def test_each_task_has_epochs_of_its_own() -> None:
    tasks = ["a"] * 4 + ["b"] * 10
    order = MixedOrder(tasks, {"a": 1, "b": 1}, seed=3)
    taken = order.take(0, 40)
    of = {name: [i for i in taken if tasks[i] == name] for name in "ab"}
    assert len(of["a"]) == len(of["b"]) == 20
    for name, size in (("a", 4), ("b", 10)):
        epochs = [of[name][at : at + size] for at in range(0, 20, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert epochs[0] != epochs[1]
    assert taken != MixedOrder(tasks, {"a": 1, "b": 1}, seed=4).take(0, 40)


def test_without_weights_every_prompt_comes_once_per_epoch() -> None:
    assert make_order(["a", "b", "b"], None, 5).take(0, 7) == PromptOrder(3, 5).take(0, 7)


def test_weights_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="the task b has a weight, but no prompts"):
        MixedOrder(["a"], {"a": 1, "b": 1}, 0)
    with pytest.raises(ValueError, match="the task c has no weight"):
        MixedOrder(["a", "c"], {"a": 1}, 0)
    with pytest.raises(ValueError, match=r"tasks\.train\.a\.weight = 0, must be positive"):
        MixedOrder(["a"], {"a": 0}, 0)


def rows(tmp_path: Path, *prompts: str) -> str:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1", "d": "t"}) + "\n" for prompt in prompts))
    return str(path)


def tasks(path: str, **keys: Any) -> TasksConfig:
    split = TaskConfig(source="split", of="all", **{"hold_out": 3, **keys})
    return TasksConfig(
        train={"all": TaskConfig(source="jsonl", path=path, demonstrations="column:d")}, eval={"part": split}
    )


def test_a_split_is_seeded_disjoint_and_whole(tmp_path: Path, printable: PreTrainedTokenizerFast) -> None:
    prompts = [f"q{i}" for i in range(20)]
    path = rows(tmp_path, *prompts, *prompts[:10])  # ten of them twice
    check_tasks(tasks(path))
    loaded = load_tasks(tasks(path), printable)
    held = [sample.prompt for sample in loaded.eval["part"]]
    left = [sample.prompt for sample in loaded.train]
    assert len(held) == len(set(held)) == 3
    assert not set(held) & set(left)
    assert set(held) | set(left) == set(prompts)
    sample = loaded.eval["part"][0]
    assert (sample.task, sample.answer, sample.demonstration) == ("part", "1", sample.metadata["d"])
    assert sample.id == f"part/{prompts.index(str(sample.prompt))}"
    assert [s.prompt for s in load_tasks(tasks(path), printable).eval["part"]] == held
    assert [s.prompt for s in load_tasks(tasks(path, seed=2), printable).eval["part"]] != held
    backwards = load_tasks(tasks(rows(tmp_path, *reversed(prompts))), printable)
    assert {s.prompt for s in backwards.eval["part"]} == set(held)
    assert len(load_tasks(tasks(path, hold_out=0.25), printable).eval["part"]) == 5
    for wrong in (20, 0.01):
        with pytest.raises(ValueError, match=rf"hold_out = {wrong} is .* of the 20 different prompts"):
            load_tasks(tasks(path, hold_out=wrong), printable)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of": None}, r"tasks\.eval\.part\.of: is missing"),
        ({"of": "al"}, r"of: unknown train task 'al'; did you mean 'all'"),
        ({"hold_out": None}, "hold_out: is missing"),
        ({"hold_out": 0.0}, "hold_out = 0.0, must be a whole number"),
        ({"hold_out": 2.5}, "hold_out = 2.5, must be a whole number"),
        ({"prompt": "{prompt}!"}, "prompt: has no effect with source: split"),
        ({"size": 3}, "size: has no effect with source: split"),
        ({"weight": 1.0}, "weight: .*"),
    ],
)
def test_a_split_with_a_mistake(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tasks(rows(tmp_path, "a", "b"))
    config.eval["part"] = dataclasses.replace(config.eval["part"], **change)
    with pytest.raises(ValueError, match=message):
        check_tasks(config)


def test_splits_and_weights_where_they_do_not_belong(tmp_path: Path) -> None:
    config = tasks(rows(tmp_path, "a", "b"))
    config.train["all"].exclude = ["part"]
    with pytest.raises(ValueError, match=r"exclude: part is a split, whose prompts leave all anyway"):
        check_tasks(config)
    config = tasks(rows(tmp_path, "a", "b"))
    config.train["more"] = dataclasses.replace(config.train["all"], weight=2.0)
    with pytest.raises(ValueError, match=r"tasks\.train\.all\.weight: is missing; give every train task a weight"):
        check_tasks(config)
    config.train["all"].weight = -1.0
    with pytest.raises(ValueError, match=r"weight = -1.0, must be positive"):
        check_tasks(config)
    config = tasks(rows(tmp_path, "a", "b"))
    config.train["all"] = TaskConfig(source="split", of="all", hold_out=1)
    with pytest.raises(ValueError, match="source: split is for eval tasks"):
        check_tasks(config)
    config = tasks(rows(tmp_path, "a", "b"))
    config.train["all"].chat_params = {"enable_thinking": False}
    with pytest.raises(ValueError, match="chat_params: has no effect without chat: true"):
        check_tasks(config)
    config.train["all"].chat_params, config.train["all"].chat_template = {}, "nowhere.jinja"
    with pytest.raises(ValueError, match="chat_template: has no effect without chat: true"):
        check_tasks(config)
    config.train["all"].chat = True
    with pytest.raises(ValueError, match="chat_template: cannot read nowhere"):
        check_tasks(config)


def test_an_evaluation_reads_train_tasks_only_where_a_split_takes_its_prompts_from_them(
    tmp_path: Path, printable: PreTrainedTokenizerFast
) -> None:
    path = rows(tmp_path, *(f"q{i}" for i in range(20)))
    trained = tasks(path)
    trained.train["elsewhere"] = TaskConfig(source="jsonl", path=str(tmp_path / "not_here.jsonl"))
    needed = tasks_to_evaluate(trained)
    assert needed.train.keys() == {"all"}
    check_tasks(needed)
    config = Config(run_dir="", tasks=trained)
    held = load_prompts(config, printable, pytest.fail, training=False)
    assert held.train == []
    assert held.eval == load_tasks(tasks(path), printable).eval
    config.tasks = TasksConfig(eval={"own": TaskConfig(source="jsonl", path=path)})
    assert len(load_prompts(config, printable, pytest.fail, training=False).eval["own"]) == 20
