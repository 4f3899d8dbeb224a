"""The places that recipes read, as on a login node: real shapes, no weights, a row of data in each format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.published import published_config, published_names
from megatron_rl.weights.create import write_tokenizer
from tests.agents import talking

from . import tiny
from .shipped import ROOT, runnable, tasks_of


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, places: tuple[Path, Path]) -> None:
    """Recipes find these places, from the root of the repository."""
    models, data = places
    monkeypatch.setenv("MODELS", str(models))
    monkeypatch.setenv("DATA", str(data))
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of models, with the real config.json and empty weights, and of data, with a row in each format."""
    models, data = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("data")
    words = tmp_path_factory.mktemp("words")  # of agents' models, whose templates are looked at
    write_tokenizer(words, CreateModelConfig(characters=talking.CHARACTERS, vocab_size=64))
    (words / "chat_template.jinja").write_text(talking.TEMPLATE)
    for model in published_names():
        folder = models / model
        shutil.copytree(words, folder)
        (folder / "config.json").write_text(json.dumps(published_config(model)))
        (folder / "model.safetensors").touch()
    for name in runnable():
        for task in tasks_of(name):
            if "path" in task:
                assert task["source"] in ("jsonl", "parquet"), f"{name}: {task}"
                path = Path(task["path"].replace("${oc.env:DATA,data}", str(data)))
                tiny.save_rows(path, [tiny.kind(path)[0]])
    return models, data
