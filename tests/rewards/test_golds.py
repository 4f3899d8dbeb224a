"""Gold answers that would grade wrongly are named before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.sample import Sample
from megatron_rl.rewards import Scorer, make_reward
from megatron_rl.rewards.gold_checks import doubtful_golds
from megatron_rl.rewards.maths_lenient import same_answer

GSM8K = "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $18 a day.\n#### 18"
PROSE = "Janet sells nine duck eggs a day. She makes 9 * 2 dollars, which is 18 in all."


def test_sentences_are_named_and_counted() -> None:
    (said,) = doubtful_golds([("t/0", "18"), ("t/1", PROSE), ("t/2", PROSE)], same_answer)
    assert said.startswith("2 of 3 gold texts are sentences")
    assert "t/1" in said
    assert "gold_after" in said


def test_a_gold_answer_that_accepts_wrong_ones_is_named() -> None:
    def careless(completion: str, gold: str) -> bool:  # as a parser that drops what it does not know
        return "k" in completion

    said, refused = doubtful_golds([("t/0", "18"), ("t/1", "k^2"), ("t/2", "y^2")], careless)
    assert said.startswith("1 of 2 gold answers that are expressions accept wrong answers")
    assert "t/1 ('k^2')" in said
    assert refused.startswith(
        "1 of 2 gold answers that are expressions are refused when they are given themselves: t/2"
    )


def test_numbers_lists_and_words_need_no_comparison() -> None:
    def unused(completion: str, gold: str) -> bool:
        raise AssertionError(gold)

    golds = ["18", r"\frac{1}{2}", "(1, 2)", r"\{1, 2\}", r"\text{east}", "1.5e3", r"50\%", r"v = \boxed{1.8e6}"]
    assert doubtful_golds([(str(i), gold) for i, gold in enumerate(golds)], unused) == []


@pytest.mark.parametrize(
    "gold",
    [
        r"\frac{x^2}{2}",
        r"(-\infty, 3]",
        r"\pm \sqrt{2}",
        r"m_{p} c^{2}\left(\gamma^{2}-1\right) \sin ^{2} \theta",
        r"\hbar \omega(v+1 / 2)-\frac{E_{0}^{2} e^{2}}{2 m \omega^{2}}",
    ],
)
def test_what_these_graders_read_rightly_is_not_reported(gold: str) -> None:
    assert doubtful_golds([("t/0", gold)], same_answer) == []


def test_a_scorer_says_it_of_its_samples() -> None:
    scorer = Scorer({"correct": RewardConfig(reward="math")})
    said = scorer.doubts([Sample(id=f"t/{i}", task="t", prompt="p", prompt_ids=[1], answer=PROSE) for i in range(7)])
    assert [text.partition(" gold")[0] for text in said] == ["the reward 'correct': 7 of 7"]
    assert "and 2 more" in said[0]
    scorer.close()


def test_a_whole_gsm8k_solution_is_refused() -> None:
    with pytest.raises(ValueError, match="set gold_after: '####'"):
        make_reward("math").check_sample({"answer": GSM8K})
    make_reward("math", gold_after="####").check_sample({"answer": GSM8K})


def test_check_looks_at_the_gold_answers_of_the_first_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "How much?", "answer": GSM8K}) + "\n")
    recipe = tmp_path / "recipe.yaml"
    task = f"{{source: jsonl, path: {tmp_path}/gsm8k.jsonl, columns: {{prompt: question}}}}"
    recipe.write_text(
        f"run_dir: {tmp_path}/run\nmodel: {{create: {{max_positions: 2048}}}}\n"
        f"tasks: {{train: {{g: {task}}}}}\nrewards: {{correct: {{reward: math}}}}\n"
    )
    assert main(["train", str(recipe), "--check"]) == 2
    assert "tasks.train.g: " in (error := capsys.readouterr().err)
    assert "set gold_after: '####'" in error
    assert main(["train", str(recipe), "rewards.correct.params.gold_after='####'", "--check"]) == 0
