"""Bad recipes and overrides: one message, soon, from `--check`; never a traceback, never a wait without end."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.fuzz.recipes import Case, base_tree, check_case, try_case

CASES, PARTS = 120, 8  # `make fuzz` tries thousands


@pytest.mark.parametrize("part", range(PARTS))
def test_mutated_recipes(part: int) -> None:
    for number in range(part, CASES, PARTS):
        try:
            try_case(number)
        except Exception as error:
            raise AssertionError(f"case {number} of tests.fuzz.recipes: {error!r}") from error


SHARE, SUMS = "tasks.train.sums.demonstration_params.share", "tasks.train.sums"
REFUSED = {
    f"{SHARE}=abc": "`share` must be a number, not 'abc'",
    f"{SHARE}=[1]": "`share` must be a number, not [1]",
    f"{SHARE}=null": "`share` must be a number, not null",
    "rewards.correct={reward: reward_model, params: {path: 5}}": "reward_model: `path` must be text or null, not 5",
    f"run_dir={'a' * 300}": "has a part of more than 255 bytes",
    f"run_dir={'a/' * 3000}": "is longer than 3500 bytes",
    "run_dir=": "`run_dir` '' is empty; give it a folder",
    "run_dir=a\nb": "has a line break",
    "run_dir=a\0b": "has a line break or another character that cannot be printed",
    f"trainer.steps={'9' * 5000}": "the value is not valid YAML: Exceeds the limit",
    f"trainer.steps=0x{'f' * 5000}": "must be at most 1,000,000,000; it is a number of 20000 bits",
    f"rewards.correct.params.after={'[' * 3000}{']' * 3000}": "it is nested too deeply",
    f"rewards.correct.params.after={'[' * 80}{']' * 80}": "is nested more than 50 levels deep",
    "tasks.train.file.path=/dev/zero": "/dev/zero is a device, not a file",
    "tasks.train.file.path=pipe": "pipe is a pipe, not a file; write what it gives into a file",
    "seed=-1": "`seed` must be at least 0; it is -1",
    "seed=4294967296": "`seed` must be at most 4,294,967,295; it is 4294967296",
    "rollout.temperature=2.5": "`rollout.temperature` must be at most 2; it is 2.5",
    "launch.timeout_minutes=1e300": "`launch.timeout_minutes` must be at most 1,000,000; it is 1e+300",
    "launch.timeout_minutes=1e-300": "`launch.timeout_minutes` must be at least 0.001; it is 1e-300",
    "watchdog.default_minutes=1e-300": "`watchdog.default_minutes` must be at least 0.001",
    "watchdog.phases.update=1e300": "`watchdog.phases.update` must be at most 1,000,000",
    "algorithm.kl.coef=.nan": "`algorithm.kl.coef` must be a finite number; it is nan",
    "algorithm.correction.filters=[{low: .nan}]": "`algorithm.correction.filters[0].low` must be a finite number; it is nan",
    "trainer.eval_threshold=.nan": "`trainer.eval_threshold` must be a finite number; it is nan",
    "tasks.eval.part.hold_out=.inf": "hold_out = inf, must be a whole number of prompts",
    f"rollout.group_size={10**15}": "`rollout.group_size` must be at most 100,000; it is 1000000000000000",
    f"rollout.group_size={10**23}": "`rollout.group_size` must be at most 100,000; it is a number of 77 bits",
    "rollout.group_size=100000 trainer.prompts_per_step=1000000": "a step has 100,000,000,000 rollouts",
    f"model.create.layers={10**15}": "`model.create.layers` must be at most 10,000",
    "model.create.layers=10000 model.create.hidden_size=1000000": "parameters, which would be made at random",
    f"rollout.max_concurrent={10**15}": "`rollout.max_concurrent` must be at most 1,000,000",
    "actor.parallel.tensor=99991 rollout.tensor_parallel=99989": "processes on this machine, at most 4,096 are started",
    f"{SUMS}.params.min_terms=abc": "params: chain_sum: `min_terms` must be an integer, not 'abc'",
    f"{SUMS}.params.min_terms=9": "max_terms must be >= min_terms",
    f"{SUMS}.prompt={{nope}}": "prompt: no item of chain_sum has a field 'nope'; {prompt} is the question",
    f"{SUMS}.prompt=": "prompt: the template is empty",
    f"{SUMS}.prompt={{expression:>9999999999}}": "may have widths up to 10000",
    "tasks.train.tools.prompt={nope}": "asks for what this sample lacks: unknown field 'nope'",
    "tasks.train.file.prompt={level:%}{prompt:d}": "cannot be filled in: Unknown format code 'd'",
    "tasks.train.file.columns.answer=promt": "did you mean 'prompt'? (it has prompt, answer, metadata, ",
    "tasks.train.file.columns.prompt=metadata": "'metadata' must be text or a list of chat messages with a role",
    "rewards.judge.reward=.:x": "names neither a Python file nor a module",
    f"model.path={'a' * 300}": "File name too long",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=lambda text: text[:60].encode("unicode_escape").decode())
def test_what_used_to_end_in_a_traceback_or_to_fail_later(
    overrides: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _refused(tmp_path, Case(yaml.safe_dump(base_tree(tmp_path)).encode(), _split(overrides)))
    assert REFUSED[overrides] in said, said


def _split(overrides: str) -> tuple[str, ...]:
    return tuple(overrides.split(" ")) if overrides.count("=") > 1 and "{" not in overrides else (overrides,)


def _refused(folder: Path, case: Case) -> str:
    code, said = check_case(case, folder)
    assert code == 2, said
    return said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base: "a\\0b"', "is no path of a file: embedded null byte"),
        ("base: pipe", "pipe, the `base` of recipe.yaml, cannot be read: pipe is a pipe, not a file"),
        ("a: " + "[" * 900 + "]" * 900, "it is nested too deeply"),
        ("run_dir: !!timestamp x", "is not valid YAML"),
        (
            "\n".join(f"x{i}: &x{i} [{f'*x{i - 1}, ' * 9 if i else 1}]" for i in range(30)),
            "repeats its anchors more than",
        ),
    ],
    ids=["NUL", "pipe", "deep", "date", "aliases"],
)
def test_files_that_used_to_end_in_a_traceback_or_not_at_all(tmp_path: Path, text: str, message: str) -> None:
    base_tree(tmp_path)
    said = _refused(tmp_path, Case(text.encode()))
    assert message in said, said


def test_recipes_that_are_no_files(tmp_path: Path) -> None:
    base_tree(tmp_path)
    assert "pipe is a pipe, not a file" in _refused(tmp_path, Case(b"", (), "pipe"))
    assert "/dev/zero is a device, not a file" in _refused(tmp_path, Case(b"", (), "/dev/zero"))


def test_a_long_chain_of_bases(tmp_path: Path) -> None:
    for i in range(1200):
        (tmp_path / f"chain_{i}.yaml").write_text(f"base: chain_{i + 1}.yaml\n")
    assert "more than 100 recipes build on one another" in _refused(tmp_path, Case(b"", (), "chain_0.yaml"))


def test_a_prompt_that_is_nested_is_refused_before_the_run(tmp_path: Path) -> None:
    """BFCL keeps turns of messages, a list of lists."""
    tree = base_tree(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"question": [[{"role": "user", "content": "x"}]], "level": 1}\n')
    tree["tasks"]["train"]["file"] |= {"columns": {"prompt": "question"}, "prompt": "{prompt}"}
    said = _refused(tmp_path, Case(yaml.safe_dump(tree).encode()))
    assert "'question' must be text or a list of chat messages with a role" in said


def test_the_recipe_that_is_mutated_is_a_good_one(tmp_path: Path) -> None:
    code, said = check_case(Case(yaml.safe_dump(base_tree(tmp_path)).encode()), tmp_path)
    assert code == 0, said
