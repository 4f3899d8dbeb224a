"""Generated puzzles: what the samples hold, and that they are a pure function of the recipe."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.schema import TaskConfig, TasksConfig
from megatron_rl.data.sample import Sample
from megatron_rl.rewards import make_reward
from megatron_rl.tasks import filter_by_length, load_task, load_tasks

SUMS = {"min_terms": 4, "max_terms": 6, "min_digits": 1, "max_digits": 1}


def sums(**keys: Any) -> TaskConfig:
    defaults = {"source": "reasoning_gym", "name": "chain_sum", "params": SUMS, "size": 20}
    return TaskConfig(**{**defaults, "prompt": "{expression:compact}=", **keys})


def sample(tokens: int, name: str = "a/0") -> Sample:
    return Sample(id=name, task="a", prompt="", prompt_ids=[0] * tokens)


def test_a_sum_is_written_compactly_and_keeps_what_its_verifier_needs(digits: PreTrainedTokenizerFast) -> None:
    samples = load_task("sums", sums(), digits)
    assert [s.id for s in samples] == [f"sums/{i}" for i in range(20)]
    for s in samples:
        assert isinstance(s.prompt, str)
        expression = s.metadata["expression"]
        assert s.prompt == expression.replace(" ", "") + "="
        assert digits.decode(s.prompt_ids) == s.prompt
        assert int(s.answer) == eval(expression)
        assert s.task == "sums"
        assert s.metadata["source_dataset"] == "chain_sum"
        assert s.metadata["question"].endswith(f"{expression} =")


def test_items_depend_on_the_seed_and_on_nothing_else(digits: PreTrainedTokenizerFast) -> None:
    assert load_task("sums", sums(), digits) == load_task("sums", sums(), digits)
    assert load_task("sums", sums(seed=2), digits)[0].prompt != load_task("sums", sums(seed=100), digits)[0].prompt


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "knights_knaves", "maze"])
def test_every_dataset_scores_its_own_answers_in_full(name: str, printable: PreTrainedTokenizerFast) -> None:
    reward = make_reward("puzzle")
    for s in load_task("puzzles", TaskConfig(source="reasoning_gym", name=name, size=3), printable):
        assert reward(s.answer, s.as_mapping()) == 1.0


def test_a_verifier_is_set_up_with_the_datasets_parameters(printable: PreTrainedTokenizerFast) -> None:
    task = TaskConfig(source="reasoning_gym", name="puzzle24", size=1, params={"max_value": 6})
    (item,) = load_task("puzzles", task, printable)
    assert item.metadata["source_params"] == {"max_value": 6}


def test_prompts_of_an_eval_task_leave_the_train_task(digits: PreTrainedTokenizerFast) -> None:
    tasks = TasksConfig(train={"sums": sums(size=40, exclude=["test"])}, eval={"test": sums(size=15, seed=21)})
    # chain_sum draws item i from seed + i: the test's items 0..14 are the train task's items 20..34.
    loaded = load_tasks(tasks, digits)
    assert [s.id for s in loaded.train] == [f"sums/{i}" for i in [*range(20), *range(35, 40)]]
    assert not {s.prompt for s in loaded.train} & {s.prompt for s in loaded.eval["test"]}


def test_several_train_tasks_follow_one_another(digits: PreTrainedTokenizerFast) -> None:
    loaded = load_tasks(TasksConfig(train={"a": sums(size=2), "b": sums(size=3, seed=9)}), digits)
    assert [s.id for s in loaded.train] == ["a/0", "a/1", "b/0", "b/1", "b/2"]


def test_nothing_left_to_train_on_is_refused(digits: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"task sums: it has no prompts \(5 of its items"):
        load_tasks(TasksConfig(train={"sums": sums(size=5, exclude=["test"])}, eval={"test": sums(size=5)}), digits)


def test_excluding_needs_the_eval_tasks(digits: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="load_tasks"):
        load_task("sums", sums(exclude=["test"]), digits)


def test_a_parameter_the_dataset_refuses_is_the_users_mistake(digits: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"task sums: reasoning_gym's chain_sum refuses.*max_terms must be >="):
        load_task("sums", sums(params={"min_terms": 9, "max_terms": 3}), digits)


def test_characters_the_tokenizer_lacks_are_named(digits: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"characters it does not know: ' '.*'S'|characters it does not know: .*'S'"):
        load_task("sums", sums(prompt="{prompt}"), digits)


def test_a_chat_template_goes_around_the_prompt(printable: PreTrainedTokenizerFast) -> None:
    (s,) = load_task("sums", sums(size=1, chat=True), printable)
    expression = s.metadata["expression"].replace(" ", "")
    assert printable.decode(s.prompt_ids) == f"[user]{expression}=\n[assistant]"


def test_chat_needs_a_template(digits: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="chat: true needs a tokenizer with a chat template"):
        load_task("sums", sums(chat=True), digits)


def test_a_template_field_nobody_knows(digits: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="unknown field 'expresion'; did you mean 'expression'"):
        load_task("sums", sums(prompt="{expresion}"), digits)


def test_long_prompts_are_refused_or_counted() -> None:
    samples = [sample(3, "a/0"), sample(9, "a/1"), sample(5, "a/2"), sample(6, "a/3")]
    assert filter_by_length(samples, 9, "error") == (samples, 0)
    assert filter_by_length(samples, 5, "drop") == ([samples[0], samples[2]], 2)
    with pytest.raises(ValueError, match=r"2 of 4 prompts .*max_prompt_tokens = 5 .*a/1, has 9\).*too_long=drop"):
        filter_by_length(samples, 5, "error")
    with pytest.raises(ValueError, match="no prompt has at most"):
        filter_by_length(samples, 2, "drop")
