"""A run that is killed in the middle of its conversations: what is in the journal is neither drawn nor asked again."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.agents import journal
from megatron_rl.agents.journal import Resumed
from megatron_rl.data.exact_json import from_json, to_json
from megatron_rl.data.rollout import Rollouts
from tests.agents import talking

TEXTS = ["what is 1+1?", "say something.", "who are you?"]


class Step:
    """A step's conversations, held with what is in a folder of journals."""

    def __init__(self, folder: Path, words: Any) -> None:
        self.folder, self._words = folder, words
        self.engine, self.resumed = talking.Arithmetic(), Resumed()

    def __call__(
        self, name: str, agent: str = "moody", texts: Any = TEXTS, weights: str = "w", **keys: Any
    ) -> list[Any]:
        """The bits of what is drawn. `name`: of the folder."""
        config = talking.recipe(agent, **keys)
        prompts = talking.samples(self.folder, config, self._words, texts)
        self.engine = talking.Arithmetic()
        with talking.hosted(config, self._words) as conversations:
            rollouts: Rollouts = talking.conversed(
                conversations, prompts, engine=self.engine, tokens=400, journal=(self.folder / name, weights)
            )
            self.resumed = conversations.take_resumed()
        return talking.bits(rollouts)

    def file(self, name: str, engine: int = 0) -> Path:
        return self.folder / name / f"engine_{engine}"

    def cut(self, name: str, to: str, size: int, engine: int = 0) -> int:
        """What a kill leaves of a journal after `size` bytes; how often the shop had been asked then."""
        written = self.file(name).read_bytes()[:size]
        self.file(to).parent.mkdir()
        self.file(to, engine).write_bytes(written)
        return self.count(to, "asked", engine)

    def count(self, name: str, kind: str, engine: int = 0) -> int:
        """Whole lines of a kind; the last may be whole without its end."""
        return sum(kind in line for line in journal._lines(self.file(name, engine)))


@pytest.fixture
def step(tmp_path: Path, words: Any) -> Step:
    talking.SHOP.clear()
    return Step(tmp_path, words)


@pytest.mark.parametrize("parts", [False, True])
def test_thirty_kills_leave_no_trace(step: Step, parts: bool) -> None:
    """A journal is only added to, so a kill leaves some beginning of it, which may end within a line. `parts`: rollouts of
    three sequences."""
    keys: dict[str, Any] = {
        "params": {"parts": parts},
        "max_turns": 6,
        "turn_tokens": 40,
        "sequences": 3 if parts else 1,
    }
    whole = step("whole", **keys)
    asked, written, turns = list(talking.SHOP), step.file("whole").read_bytes(), 36 if parts else 18
    assert len(asked) == len(set(asked)) == 18
    assert len(step.engine.submitted) == turns
    rng = random.Random(1)
    for number, size in enumerate([*rng.sample(range(len(written)), 13 if parts else 28), 0, len(written)]):
        # Those asked behind the cut were not yet asked when the process was killed.
        talking.SHOP[:] = asked[: step.cut("whole", f"{number}", size)]
        drawn, ended = step.count(f"{number}", "turn"), step.count(f"{number}", "rollout")
        assert step(f"{number}", **keys) == whole, size
        assert len(step.engine.submitted) == turns - drawn
        assert sorted(talking.SHOP) == sorted(asked), "nothing is asked twice, and nothing is left out"
        assert (step.resumed.whole, step.resumed.otherwise, step.resumed.dropped[1:]) == (ended, 0, [])
        if number % 6 == 0:
            again = step.file(f"{number}").read_bytes()
            assert step(f"{number}", **keys) == whole
            assert step.engine.submitted == [], "what was resumed is in the journal, too"
            assert step.file(f"{number}").read_bytes().strip() == again.strip()


def test_without_the_journal_s_replies_an_environment_says_something_else(step: Step) -> None:
    whole = step("whole", params={"recorded": False})
    step.cut("whole", "cut", 9000)
    assert step("cut", params={"recorded": False}) != whole
    assert step.resumed.otherwise, "what the agent asked then, it does not ask now"


def test_another_engine_goes_on_with_what_one_has_begun(step: Step) -> None:
    whole = step("whole")
    asked = list(talking.SHOP)
    size = len(step.file("whole").read_bytes()) // 2
    talking.SHOP[:] = asked[: step.cut("whole", "cut", size, engine=1)]
    assert step("cut") == whole
    assert len(step.engine.submitted) < 18
    talking.SHOP[:] = asked
    (step.folder / "empty").mkdir()
    step.file("empty", engine=1).touch()  # it begins its journal at this moment
    step("empty")
    assert str(step.resumed) == ""
    talking.SHOP[:] = asked
    shutil.copytree(step.folder / "cut", step.folder / "both")
    assert step("both") == whole
    assert step.engine.submitted == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weights": "v"}, "the weights"),
        ({"max_turns": 5}, "tasks.train.t.agent"),
        ({"params": {"word": "or"}}, "tasks.train.t.agent"),
    ],
)
def test_what_was_written_for_others_is_dropped_by_name(step: Step, change: dict[str, Any], named: str) -> None:
    step("whole")
    talking.SHOP.clear()
    fresh = step("fresh", **change)
    talking.SHOP.clear()
    assert step("whole", **change) == fresh
    assert len(step.engine.submitted) == 18
    assert str(step.resumed) == f"whole/engine_0 is not used: {named} had another value"
    assert step("whole", **change) == fresh
    assert step.engine.submitted == [], "the file was begun anew"


def test_an_agent_s_file_that_has_changed_is_not_asked_for_its_old_verdict(step: Step) -> None:
    source = Path(talking.__file__).read_text().replace("float(len(messages))", "-1.0")
    path = step.folder / "mine.py"
    path.write_text(Path(talking.__file__).read_text())
    step("whole", agent=f"{path}:moody")
    path.write_text(source)
    step("whole", agent=f"{path}:moody")
    assert str(step.resumed).endswith(f"the file of {path}:moody had another value")


def test_a_prompt_that_has_changed_is_conversed_about_anew(step: Step) -> None:
    step("whole")
    talking.SHOP.clear()
    others = ["say anything.", *TEXTS[1:]]
    fresh = step("fresh", texts=others)
    talking.SHOP.clear()
    assert step("whole", texts=others) == fresh
    assert (step.resumed.whole, len(step.engine.submitted)) == (4, 6)


def test_what_the_infrastructure_lost_is_held_again(step: Step) -> None:
    lost = step("whole", agent="failing", params={"how": "raise", "of": "something"})
    assert sum(bits[-1] == "infrastructure" for bits in lost) == 2
    assert step("whole", agent="failing", params={"how": "raise", "of": "something"}) == lost
    assert (step.resumed.whole, step.resumed.continued) == (4, 2)
    assert step.engine.submitted == []


def test_a_full_disk_ends_the_journal_and_not_the_run(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = step("whole")
    talking.SHOP.clear()
    opened = Path.open

    class Full:
        """A file on a disk with room for two lines."""

        def __init__(self, file: Any) -> None:
            self._file, self._room, self.name = file, 2, file.name

        def write(self, data: bytes) -> int:
            self._room -= 1
            if self._room < 0:
                raise OSError(28, "No space left on device")
            return int(self._file.write(data))

        def close(self) -> None:
            self._file.close()

    def full(path: Path, *how: Any, **more: Any) -> Any:
        file = opened(path, *how, **more)
        return Full(file) if path.name == "engine_0" and how == ("wb",) else file

    monkeypatch.setattr(Path, "open", full)
    assert step("full") == whole
    assert "is not written any further: [Errno 28] No space left on device" in str(step.resumed)


def test_journals_of_steps_that_a_checkpoint_has_are_removed(tmp_path: Path) -> None:
    for number in (1, 2, 11):
        (tmp_path / journal.FOLDER / f"step_{number}").mkdir(parents=True)
    journal.drop(tmp_path, 2)
    assert [path.name for path in (tmp_path / journal.FOLDER).iterdir()] == ["step_11"]
    journal.drop(tmp_path, 11)
    assert not (tmp_path / journal.FOLDER).exists()


def test_values_come_back_from_json_as_they_were() -> None:
    value = {
        "a": [1, 2.5, None, True, "\ud83d", float("inf")],
        3: (1, ("b",)),
        "~b": {"~": b"\x00\xff"},
        "c": np.array([[1.5, np.nan]], dtype=np.float32),
        "d": {"~tuple": [1]},
    }
    again = from_json(to_json(value))
    np.testing.assert_array_equal(again.pop("c"), value.pop("c"))
    assert again == value
    assert type(again[3]) is tuple
    with pytest.raises(TypeError, match="object has no form"):
        to_json({"a": object()})
    for damaged in ({"~array": ["|O", [1], "AAAAAAAAAAA="]}, {"~Path": "/"}):
        with pytest.raises(ValueError, match=r"array of object|unknown object"):
            from_json(damaged)
