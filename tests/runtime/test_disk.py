from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.runtime.disk import json_lines, size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (640, "640 bytes"),
        (1024, "1.00 KiB"),
        (400_000, "391 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (2**20 * 23.44, "23.4 MiB"),
        (9.999 * 2**30, "10.0 GiB"),
        (79 * 2**30, "79.0 GiB"),
        (5e15, "4547 TiB"),
    ],
)
def test_a_size_is_shown_in_a_unit_that_says_something(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


def test_a_line_that_a_kill_cut_within_a_character_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, second = '{"text": "é"}\n'.encode(), '{"text": "数学"}'.encode()
    for end in range(1, len(second)):
        path.write_bytes(first + second[:end])
        assert [*json_lines(path)] == [{"text": "é"}]
    path.write_bytes(first + second)
    assert [*json_lines(path)] == [{"text": "é"}, {"text": "数学"}]
