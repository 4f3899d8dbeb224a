"""Prompts from Parquet and Hugging Face datasets: columns, chat templates with tools, errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.schema import ColumnsConfig, TaskConfig, TasksConfig
from megatron_rl.tasks import check_tasks, load_task
from megatron_rl.tasks.row_mapping import to_item
from megatron_rl.tasks.rows import huggingface_rows

CALL = {"name": "add", "parameters": {"x": 1}}
TAGGED = f"<think> t </think>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
NESTED = [
    {
        "prompt": [{"role": "user", "content": f"q{i}"}],
        "reward_model": {"ground_truth": f"a{i}", "style": "rule"},
        "extra_info": {"index": i, "level": {"name": "easy"}},
    }
    for i in range(3)
]
COLUMNS = ColumnsConfig(answer="reward_model.ground_truth", metadata={"index": "extra_info.index"})

Save = Callable[[list[dict[str, Any]]], dict[str, Any]]


@pytest.fixture(params=["jsonl", "parquet", "save_to_disk", "dataset_dict", "folder"])
def save(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """Writes rows in one of the forms, and gives the task's keys that read them back."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def save(rows: list[dict[str, Any]]) -> dict[str, Any]:
        path = tmp_path / f"rows.{request.param}"
        table = pyarrow.Table.from_pylist(rows)
        if request.param == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif request.param == "parquet":
            pyarrow.parquet.write_table(table, path)
        elif request.param == "save_to_disk":
            datasets.Dataset(table).save_to_disk(str(path))
        elif request.param == "dataset_dict":
            datasets.DatasetDict({"train": datasets.Dataset(table)}).save_to_disk(str(path))
        else:
            (path / "data").mkdir(parents=True)
            pyarrow.parquet.write_table(table, path / "data" / "train-00000-of-00001.parquet")
        source = request.param if request.param in ("jsonl", "parquet") else "huggingface"
        return {"source": source, "path": str(path)}

    return save


def test_one_mapping_for_every_source(save: Save, printable: PreTrainedTokenizerFast) -> None:
    config = TaskConfig(**save(NESTED), columns=COLUMNS, chat=True)
    check_tasks(TasksConfig(train={"t": config}))
    samples = load_task("t", config, printable)
    assert [sample.prompt for sample in samples] == [row["prompt"] for row in NESTED]
    assert [sample.answer for sample in samples] == ["a0", "a1", "a2"]
    assert [sample.metadata["index"] for sample in samples] == [0, 1, 2]
    assert samples[1].metadata["extra_info"] == NESTED[1]["extra_info"]
    config.size = 2
    assert len(load_task("t", config, printable)) == 2


def test_nulls_that_arrow_fills_in_are_no_keys_of_messages(save: Save, printable: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "tool", "name": "add", "content": "1"}]
    keys = save([{"prompt": messages}])
    (sample,) = load_task("t", TaskConfig(**keys, chat=True), printable)
    assert sample.prompt == messages


def test_the_gold_calls_of_toolrls_parquet(save: Save, printable: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": "q", "reward_model": {"ground_truth": TAGGED}},
        {"prompt": "r", "reward_model": {"ground_truth": "<think> t </think>\n<response> no </response>"}},
    ]
    config = TaskConfig(**save(rows), columns=ColumnsConfig(tool_calls="reward_model.ground_truth"))
    called, answered = load_task("t", config, printable)
    assert (called.tool_calls, called.needs_response) == ([CALL], False)
    assert (answered.tool_calls, answered.needs_response) == ([], True)


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        json.dumps(CALL),
        [{"name": "add", "arguments": {"x": 1}}],
        [{"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}],
        TAGGED,
    ],
    ids=range(6),
)
def test_gold_calls_may_be_written_in_several_ways(calls: Any) -> None:
    assert to_item({"prompt": "q", "tool_calls": calls}, ColumnsConfig()).tool_calls == [CALL]


@pytest.mark.parametrize(
    "calls",
    [
        json.dumps([{"name": "add", "parameters": {"x": 1, "y": None}}]),
        '<think>t</think>\n<tool_call>\n{"name": "add", "parameters": {"x": 1, "y": null}}\n</tool_call>',
        [{"function": {"name": "add", "arguments": '{"x": 1, "y": null}'}}],
    ],
    ids=["json", "tags", "arguments"],
)
def test_a_null_in_the_text_of_gold_calls_is_the_data_s_own(
    calls: Any, tmp_path: Path, printable: PreTrainedTokenizerFast
) -> None:
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "q", "tool_calls": calls}]), tmp_path / "x.parquet"
    )
    (sample,) = load_task("t", TaskConfig(source="parquet", path=str(tmp_path / "x.parquet")), printable)
    assert sample.tool_calls == [{"name": "add", "parameters": {"x": 1, "y": None}}]


def test_calls_that_arrow_has_mixed_up_are_refused(tmp_path: Path, printable: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "q", "tool_calls": [CALL, {"name": "sub", "parameters": {"y": 2}}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    with pytest.raises(
        ValueError, match=r"row 1: 'tool_calls' has null parameters: .* store the gold calls as JSON text"
    ):
        load_task("t", TaskConfig(source="parquet", path=str(tmp_path / "x.parquet")), printable)


def test_tools_and_parameters_reach_the_chat_template(tmp_path: Path, printable: PreTrainedTokenizerFast) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    path = tmp_path / "x.jsonl"
    path.write_text(
        json.dumps({"prompt": "q", "tools": tools}) + "\n" + json.dumps({"prompt": "r", "tools": json.dumps(tools)})
    )
    was = printable.chat_template
    printable.chat_template = (
        "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}{{ messages[-1].content }}"
        "{% if enable_thinking is false %}!{% endif %}"
        "{% if messages[-1].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    )
    try:
        config = TaskConfig(source="jsonl", path=str(path), chat=True, chat_params={"enable_thinking": False})
        first, second = load_task("t", config, printable)
        assert [printable.decode(s.prompt_ids) for s in (first, second)] == ["<add>q!", "<add>r!"]
        assert first.metadata["tools"] == tools  # for rewards and judges
        path.write_text('{"prompt": "bad"}\n')
        with pytest.raises(ValueError, match=r"task t: the chat template refuses the prompt \[.*'bad'.*: no"):
            load_task("t", config, printable)
    finally:
        printable.chat_template = was


def test_a_system_column(tmp_path: Path, printable: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"instruction": "s", "input": "u"}\n')
    columns = ColumnsConfig(prompt="input", system="instruction")
    (sample,) = load_task("t", TaskConfig(source="jsonl", path=str(path), columns=columns, chat=True), printable)
    assert printable.decode(sample.prompt_ids) == "[system]s\n[user]u\n[assistant]"


def test_folders_and_patterns_are_read_in_order(tmp_path: Path, printable: PreTrainedTokenizerFast) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    (tmp_path / "z.txt").write_text("not data")
    for path, found in ((tmp_path, "abc"), (tmp_path / "[bc].jsonl", "bc")):
        samples = load_task("t", TaskConfig(source="jsonl", path=str(path)), printable)
        assert [sample.prompt for sample in samples] == list(found)
        assert [sample.id for sample in samples] == [f"t/{i}" for i in range(len(found))]
    with pytest.raises(ValueError, match="no file matches the pattern"):
        load_task("t", TaskConfig(source="jsonl", path=str(tmp_path / "d*.jsonl")), printable)
    with pytest.raises(ValueError, match=r"the folder has no \.parquet file"):
        load_task("t", TaskConfig(source="parquet", path=str(tmp_path)), printable)


def test_what_is_no_parquet_is_named(tmp_path: Path, printable: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("PAR1?")
    with pytest.raises(ValueError, match=r"task t: cannot read .*x\.parquet as Parquet"):
        load_task("t", TaskConfig(source="parquet", path=str(path)), printable)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["text " * 100] * 100}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(30) + whole[34:])  # the footer is fine, a page is not
    with pytest.raises(ValueError, match=r"task t: cannot read .*x\.parquet as Parquet"):
        load_task("t", TaskConfig(source="parquet", path=str(path)), printable)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("data-00000-of-00001.arrow", None, "FileNotFoundError: .*data-00000"),
        ("state.json", "{}", "KeyError: '_data_files'"),
        ("state.json", "{", "JSONDecodeError: "),
    ],
)
def test_a_damaged_folder_of_save_to_disk_is_named(
    file: str, text: str | None, reason: str, tmp_path: Path, printable: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "d"
    datasets.Dataset.from_dict({"prompt": ["q"]}).save_to_disk(str(path))
    (path / file).unlink() if text is None else (path / file).write_text(text)
    with pytest.raises(ValueError, match=rf"task t: cannot load the dataset .*d: {reason}"):
        load_task("t", TaskConfig(source="huggingface", path=str(path)), printable)


def test_files_in_a_dataset_stay_as_they_are_stored(tmp_path: Path) -> None:
    """Decoders of `datasets` take any format: PostScript would go to Ghostscript before this package looks at it."""
    file = {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n", "path": None}
    image = datasets.Image()
    kinds: dict[str, Any] = {"image": image, "all": datasets.List(image), "of": {"it": image}, "more": datasets.Json()}
    row = {"image": file, "all": [file], "of": {"it": file}, "more": {"a": 1}}
    columns = {key: [value] for key, value in row.items()}
    dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    dataset.save_to_disk(str(tmp_path / "d"))
    [(_, found)] = huggingface_rows(TaskConfig(source="huggingface", path=str(tmp_path / "d")))
    assert found == row


def test_a_split_that_does_not_exist(tmp_path: Path, printable: PreTrainedTokenizerFast) -> None:
    path = str(tmp_path / "d")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"prompt": ["q"]})}).save_to_disk(path)
    with pytest.raises(ValueError, match=r"split: .* has no split 'test', only train"):
        load_task("t", TaskConfig(source="huggingface", path=path, split="test"), printable)
    with pytest.raises(ValueError, match=r"revision: .* was written by save_to_disk"):
        load_task("t", TaskConfig(source="huggingface", path=path, revision="main"), printable)


def test_a_dataset_that_needs_the_hub_says_what_to_do_without(
    monkeypatch: pytest.MonkeyPatch, printable: PreTrainedTokenizerFast
) -> None:
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"nobody/nothing: .*HF_HUB_OFFLINE is set.*hf download nobody/nothing"):
        load_task("t", TaskConfig(source="huggingface", path="nobody/nothing"), printable)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (ColumnsConfig(prompt="prompts"), r"columns\.prompt: .*row 1: unknown column 'prompts'; did you mean 'prompt'"),
        (ColumnsConfig(answer="reward_model.truth"), r"columns\.answer: .*did you mean 'reward_model.ground_truth'"),
        (ColumnsConfig(metadata={"i": "extra_info.idx"}), r"columns\.metadata\.i: .*unknown column 'extra_info.idx'"),
    ],
)
def test_columns_are_checked_before_anything_starts(columns: ColumnsConfig, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(NESTED), path)
    with pytest.raises(ValueError, match=message):
        check_tasks(TasksConfig(train={"t": TaskConfig(source="parquet", path=str(path), columns=columns)}))
