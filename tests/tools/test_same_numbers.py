"""The comparison of `tools/same_numbers.py` tells one changed bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tools.same_numbers import compare

ROW = {"step": 1, "reward/mean": 0.1, "actor/grad_norm": math.nan, "timing_s/step": 3.0, "time": 5.0}


def results(folder: Path, row: dict[str, Any], weight: float = 1.0) -> Path:
    (folder / "export").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    save_file({"norm.weight": torch.tensor([weight])}, folder / "export" / "model.safetensors")
    return folder


def test_clocks_may_differ_and_metrics_may_be_added(tmp_path: Path) -> None:
    other = ROW | {"timing_s/step": 4.0, "time": 6.0, "actor/new": 1.0}
    assert compare(results(tmp_path / "a", ROW), results(tmp_path / "b", other), {}) == (3, 1, "")


@pytest.mark.parametrize(
    ("row", "weight", "said"),
    [
        (ROW | {"reward/mean": 0.1 + 1.4e-17}, 1.0, "step 1: reward/mean 0.1 -> 0.10000000000000002"),
        ({key: value for key, value in ROW.items() if key != "reward/mean"}, 1.0, "reward/mean 0.1 -> 'missing'"),
        (ROW, 1.0 + 2**-23, "norm.weight"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, row: dict[str, Any], weight: float, said: str) -> None:
    difference = compare(results(tmp_path / "a", ROW), results(tmp_path / "b", row, weight), {})[2]
    assert said in difference


def test_a_renamed_metric_is_compared(tmp_path: Path) -> None:
    renamed = {"reward/new" if key == "reward/mean" else key: value for key, value in ROW.items()}
    before, after = results(tmp_path / "a", ROW), results(tmp_path / "b", renamed)
    assert compare(before, after, {})[2]
    assert compare(before, after, {"reward/mean": "reward/new"})[2] == ""
