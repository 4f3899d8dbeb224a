"""A model folder's own Python files are never run: not by saying nothing, since transformers then asks the terminal."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from megatron_rl.models import read_hf_config

ROOT = Path(__file__).parents[2]
OWN_CLASS = {"megatron_rl/data/images.py"}  # a class by name, which imports nothing else


@pytest.mark.parametrize("package", ["megatron_rl", "tools", "benchmarks"])
def test_every_loading_call_says_no_to_remote_code(package: str) -> None:
    silent, seen = [], 0
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in ("from_pretrained", "from_config", "pipeline"):
                continue
            seen += 1
            said = {key.arg: key.value for key in node.keywords}.get("trust_remote_code")
            place = path.relative_to(ROOT).as_posix()
            if place not in OWN_CLASS and not (isinstance(said, ast.Constant) and said.value is False):
                silent.append(f"{place}:{node.lineno}")
    assert not silent
    assert seen or package == "tools"


@pytest.mark.parametrize(
    ("config", "tokenizer", "refused"),
    [
        ({"model_type": "qwen3"}, {"tokenizer_class": "PreTrainedTokenizerFast"}, None),
        ({"model_type": "qwen3", "auto_map": {"AutoModel": "m.M"}}, {}, None),
        ({"model_type": "own", "auto_map": {"AutoModel": "m.M"}}, {}, "config.json names them.*model_type 'own'"),
        ({"model_type": "own"}, {}, None),
        ({"model_type": "qwen3"}, {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["t.T", None]}}, "'Own'"),
        ({"model_type": "qwen3"}, {"tokenizer_class": "Qwen2Tokenizer", "auto_map": {"AutoTokenizer": ["t.T"]}}, None),
    ],
    ids=range(6),
)
def test_a_folder_that_needs_its_own_code_is_refused(
    config: dict[str, object], tokenizer: dict[str, object], refused: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if refused is None:
        assert read_hf_config(tmp_path) == config
        return
    with pytest.raises(ValueError, match=rf"needs Python files of its own.*{refused}"):
        read_hf_config(tmp_path)
