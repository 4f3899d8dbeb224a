"""Sizes of published models, by name: for plans and checks on a machine without the model's folder.

Each file holds the fields of the config.json published under its name on the Hugging Face hub (organisations Qwen,
deepseek-ai, mistralai, meta-llama) that decide sizes and layout. Tokens, versions and dropout of zero effect are left
out. The tests compare the models' parameter counts with the published ones.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.models.hf_config import JSON

FOLDER = Path(__file__).parent / "published"


def published_names() -> list[str]:
    """The models that are known, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def published_config(name: str) -> dict[str, JSON] | None:
    """The sizes in the config.json of the model of this name, such as `Qwen3-32B`; None: it is not known here."""
    if name not in published_names():
        return None
    return dict(json.loads((FOLDER / f"{name}.json").read_text("utf-8")))
