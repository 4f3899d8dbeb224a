"""The recipe that the checks of one node are made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.schema import Config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=str(tmp_path / "run"))
