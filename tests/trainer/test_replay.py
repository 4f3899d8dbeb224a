"""`megatron-rl replay`: a recorded step's rewards from its texts, as they were and with changed ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatron_rl.algorithms import make_algorithm
from megatron_rl.cli import main
from megatron_rl.data.rewards import RewardTable
from megatron_rl.data.rollout import Rollout, Segment
from megatron_rl.data.sample import Sample
from megatron_rl.runtime.distributed import EngineGroup
from megatron_rl.trainer.record import write_step
from megatron_rl.trainer.record_texts import read_texts, write_texts

MINE = """
def letters(letter: str = "a"):
    return lambda completion, sample: float(completion.count(letter) + sample["metadata"]["more"][0])
"""
COLUMNS = ("letters", "said", "judge")


def conversation(sample: Sample, index: int, words: str, said: float | None) -> Rollout:
    """`said`: what the agent returned; None: the infrastructure failed."""
    none_drawn, ids = said is None, np.arange(len(words))
    segments = [Segment(np.arange(3)), Segment(ids, np.zeros(len(ids), np.float32), 1)]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}]
    rewards = {} if said is None else {"reward": said}
    lost: Any = "infrastructure" if none_drawn else None
    return Rollout(
        sample.id, index, segments, "stop", None, messages, last_turn=words, agent_rewards=rewards, failed_by=lost
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two engines with a prompt each: a response twice, and a conversation twice, the second of which was lost."""
    (tmp_path / "mine.py").write_text(MINE)
    judge = {"urls": ["http://localhost:1/v1"], "model": "m"}
    rewards: dict[str, Any] = {
        "letters": {"reward": f"{tmp_path}/mine.py:letters"},
        "said": {"reward": "agent", "tasks": ["talk"], "weight": 0.5},
        "judge": {"reward": "judge", "params": judge},
    }
    recipe = {"run_dir": str(tmp_path), "model": {"path": "m"}, "rewards": rewards}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    single = Sample("one/0", "one", "?", [1], answer="7", metadata={"more": (2, 3), "odd": object()})
    talk = Sample("talk/0", "talk", "?", [1], agent="talk", metadata={"more": (0,)})
    held = [
        {0: Rollout.single_turn(single, 0, [1, 2], "stop"), 1: Rollout.single_turn(single, 1, [1], "length")},
        {2: conversation(talk, 0, "banana", 0.75), 3: conversation(talk, 1, "", None)},
    ]
    held[0][0].text, held[0][1].text = "a \ud83d word", "all aboard"
    path = tmp_path / "rollouts" / "step_4.npz"
    for index, rollouts in enumerate(held):
        both = [single, single, talk, talk]
        of_engine: Any = SimpleNamespace(held=rollouts, sample=both.__getitem__)
        write_texts(path, SimpleNamespace(engine=EngineGroup(index=index, count=2)), of_engine)  # type: ignore[arg-type]
    values = torch.tensor([[[3.0, 0.0, 1.0], [5.0, 0.0, 2.0]], [[3.0, 0.75, 1.0], [torch.nan] * 3]]).double()
    valid = torch.tensor([[True, True], [True, False]])
    table = RewardTable(values, COLUMNS, valid, {"letters": 1.0, "said": 0.5, "judge": 1.0})
    estimate = make_algorithm({"preset": "grpo"}).compute_advantages(table)
    write_step(path, [single.id, talk.id], table, torch.zeros(2, 2, dtype=torch.bool), estimate, parts=0)
    return tmp_path


def test_texts_come_back_as_rewards_read_them(run_dir: Path) -> None:
    texts = list(read_texts(run_dir / "rollouts" / "step_4.npz"))
    assert [(text.row, text.text, text.length, text.finish_reason) for text in texts] == [
        (0, "a \ud83d word", 2, "stop"),
        (1, "all aboard", 1, "length"),
        (2, "banana", 6, "stop"),
        (3, "", 0, "stop"),
    ]
    assert (texts[0].sample.metadata, texts[0].left_out) == ({"more": (2, 3)}, ("metadata.odd",))
    assert texts[2].sample.messages == [{"role": "user", "content": "?"}, {"role": "assistant", "content": "banana"}]
    assert texts[2].sample.agent_rewards == {"reward": 0.75}
    assert [text.failed_by for text in texts] == [None, None, None, "infrastructure"]


def test_rewards_are_what_they_were(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run_dir), "--out", str(run_dir / "out.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "Rewards of step 4, 3 rollouts" in said
    assert "->" not in said, "nothing differs"
    assert "judge is not computed again: it asks a server" in said
    lines = [json.loads(line) for line in (run_dir / "out.jsonl").read_text().splitlines()]
    assert [line["before"] for line in lines] == [
        {"letters": 3.0, "said": 0.0, "judge": 1.0},
        {"letters": 5.0, "said": 0.0, "judge": 2.0},
        {"letters": 3.0, "said": 0.75, "judge": 1.0},
    ]
    assert [line["after"] for line in lines] == [
        {"letters": 3.0, "said": 0.0},
        {"letters": 5.0, "said": 0.0},
        {"letters": 3.0, "said": 0.75},
    ]


def test_changed_rewards_and_refusals(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run_dir), "rewards.letters=null"]) == 0
    assert main(["replay", str(run_dir), "rewards.letters.params.letter=n", "--step", "4"]) == 1
    said = capsys.readouterr().out
    assert "talk/0, rollout 0: letters 3 -> 2" in said
    for arguments, message in (
        (["--step", "5"], "step 5 was not recorded; there are 4"),
        (["trainer.steps=3"], "a replay reads rewards alone"),
        (["rewards.letters.params.lettre=n"], "did you mean 'letter'"),
        (["--out", str(run_dir)], f"cannot write {run_dir}: Is a directory"),
        (["--out", "/nowhere/rows.jsonl"], "cannot write /nowhere/rows.jsonl: No such file or directory"),
    ):
        assert main(["replay", str(run_dir), *arguments]) == 2
        assert message in capsys.readouterr().err
    (run_dir / "rollouts" / "step_4.texts" / "1.jsonl").unlink()
    assert main(["replay", str(run_dir)]) == 2
    assert "2 of the step's 4 rollouts: an engine's file is missing" in capsys.readouterr().err
