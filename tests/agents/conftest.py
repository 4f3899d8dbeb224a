"""Fixtures that the tests of conversations share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agents import talking


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of `talking`."""
    return talking.tokenizer(tmp_path_factory.mktemp("words"))
