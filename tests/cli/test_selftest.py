"""`megatron-rl selftest` on a CPU: the steps that need no GPU run, on the real stack; a fault makes its step fail."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.commands import selftest
from megatron_rl.config import Machine, check, check_machine, load_recipe
from megatron_rl.runtime.spawn import RanksOutcome
from megatron_rl.selftest import speed, without_engine
from megatron_rl.selftest.bench import RECIPE, Bench
from megatron_rl.selftest.results import FAILED, OK, Result
from megatron_rl.selftest.steps import STEPS
from tests import warm

GPU_ONLY = {step.name for step in STEPS if step.need}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one whole self-test."""
    folder = tmp_path_factory.mktemp("selftest") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "run_ranks", warm.run_ranks)
        assert cli.main(["selftest", "--keep-going", "--run-dir", str(folder)]) == 0, (folder / "report.md").read_text()
    return folder


@pytest.mark.engine
def test_the_steps_that_need_no_gpu_are_right_on_a_cpu(page: Path) -> None:
    report = (page / "report.md").read_text()
    assert {"linear", "rl-offload", "speed-full", "offload"} < GPU_ONLY
    for step in STEPS:
        verdict = "left out" if step.name in GPU_ONLY else "ok"
        assert (f"| `{step.name}` | {verdict} |" in report) == (not step.asked)
    assert "no figure on this page is one of a GPU" in report
    figures = {path.parent.name: json.loads(path.read_text())["figures"] for path in page.glob("*/result.json")}
    assert figures["actor"]["experts: mean difference from transformers"] < 1e-5
    assert figures["checkpoint"] == {"resumed vs unbroken": 0.0}
    assert figures["engine-moe"]["tensors"] > figures["engine"]["tensors"]
    assert figures["engine-moe"]["drawn vs scored"] < 1e-5
    assert figures["rl-ranks"]["sync mean difference"] < 1e-5
    assert figures["rl-images"]["sync mean difference"] < 1e-5
    assert figures["exact"]["log-probs differ by"] == figures["exact-moe"]["log-probs differ by"] == 0
    assert figures["decode"]["sync s"] > 0
    assert "MFU of bf16's peak" not in figures["speed"]


@pytest.mark.engine
def test_a_fault_fails_its_step_with_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty(command: Sequence[str], processes: int, log_dir: Path, environment: Mapping[str, str]) -> RanksOutcome:
        return warm.run_ranks([*command[:2], "tests.cli.faulty_rank", *command[3:]], processes, log_dir, environment)

    monkeypatch.setattr(selftest, "run_ranks", faulty)
    arguments = ["selftest", "--only", "checkpoint", "engine", "--keep-going", "--run-dir", str(tmp_path / "run")]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().out
    assert "from an unbroken run's, as a share of what training moved, is " in said
    assert "SyncError: after a weight sync the engine's log-probs differ from the actor's" in said
    assert "the first that the engine holds otherwise is model.layers.1.input_layernorm.weight" in said
    assert "checkpoint, engine failed; report: " in said


@pytest.mark.engine
def test_where_engine_and_actor_differ_is_shown_whole_and_a_changed_operation_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(command: Sequence[str], processes: int, log_dir: Path, environment: Mapping[str, str]) -> RanksOutcome:
        return warm.run_ranks([*command[:2], "tests.cli.apart_rank", *command[3:]], processes, log_dir, environment)

    monkeypatch.setattr(selftest, "run_ranks", changed)
    assert cli.main(["selftest", "--mismatch", "--run-dir", str(tmp_path / "run")]) == 0
    steps = {path.parent.name: json.loads(path.read_text())["figures"] for path in tmp_path.glob("run/*/result.json")}
    assert steps.keys() == {"mismatch", "mismatch-moe", "mismatch-fp8"}
    kinds = {"norm", "attention", "mlp", "head"}
    for name, figures in steps.items():
        assert figures.keys() == {
            *("log-probs differ by", "left where all are added"),
            *kinds | ({"router"} if name == "mismatch-moe" else set()),
        }
        assert figures["left where all are added"] < figures["log-probs differ by"] / 1000
    assert list(steps["mismatch"])[1] == "mlp"
    share = float(steps["mismatch"]["mlp"].split()[0])
    assert share == pytest.approx(2**-4, rel=0.1)
    assert list(steps["mismatch-moe"])[1] != "mlp" or float(steps["mismatch-moe"]["mlp"].split()[0]) < share / 2
    assert cli.main(["selftest", "--only", "exact", "--run-dir", str(tmp_path / "exact")]) == 1
    assert "of 9 operations the first that gives something else is model.layers.0.mlp" in capsys.readouterr().out


def test_steps_are_named_or_compare_but_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["selftest", "--only", "versions", "--mismatch"])
    assert "not allowed with argument --only" in capsys.readouterr().err


def test_it_stops_at_the_first_surprise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = lambda step, folder, gpus: Result(step, FAILED if step.name == "actor" else OK, text="it is wrong")  # noqa: E731
    monkeypatch.setattr(selftest, "_run", wrong)
    assert cli.main(["selftest", "--run-dir", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "FAILED    actor" in said
    assert "likely: the weight map" in said
    assert "checkpoint" not in said
    assert cli.main(["selftest", "--run-dir", str(tmp_path / "run")]) == 2, "the folder is there"


def test_a_step_has_time_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM alone takes half a minute to import; a node's first run also compiles graphs, Triton's kernels, FP8 products."""
    given = []

    def hangs(command: Sequence[str], processes: int, log_dir: Path, environment: Mapping[str, str]) -> RanksOutcome:
        given.append(environment)
        return RanksOutcome(142, "rank 0 was ended by SIGALRM")

    monkeypatch.setattr(selftest, "run_ranks", hangs)
    monkeypatch.setattr(selftest, "machine_here", lambda: (Machine(gpus=1), None))
    monkeypatch.setenv("MEGATRON_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    assert cli.main(["selftest", "--only", "engine", "--run-dir", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "on a new node the steps compile kernels first, those with an engine for minutes" in said
    assert str(tmp_path / "cache" / "vllm") in said
    assert given[0]["VLLM_CACHE_ROOT"] == str(tmp_path / "cache" / "vllm")
    assert "(a step has at most 15 min, compilation included)" in said
    assert min(step.minutes for step in STEPS) >= 15
    assert Bench(tmp_path).minutes >= 15, "how long one rank waits for another that compiles"


def test_what_a_node_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {step.name: step for step in STEPS}
    monkeypatch.setattr(selftest.importlib.util, "find_spec", lambda name: object())
    assert [name for name, step in steps.items() if selftest._missing(step, gpus=1)] == ["rl-ranks"]
    assert not any(selftest._missing(step, gpus=2) for step in STEPS)
    monkeypatch.setattr(selftest.importlib.util, "find_spec", lambda name: None)
    lacking = {name for name, step in steps.items() if selftest._missing(step, gpus=2)}
    assert lacking >= {"linear", "attention", "fp8", "speed-fp8", "speed-bf16-moments"}
    assert not lacking & {"actor", "rl-offload", "speed", "speed-full", "offload"}


def test_the_options_of_every_step_are_a_recipes(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for step in STEPS:
        own = [f"run_dir={tmp_path / 'run'}", "model.create.layers=8", "model.create.kv_heads=4", *step.overrides]
        machine = Machine(gpus=2, world_size=1, local_world_size=1)
        check_machine(check(load_recipe(tmp_path / "recipe.yaml", own), machine=machine), machine)


def test_torchs_number_of_cudnn_is_the_version_that_transformer_engine_says() -> None:
    assert without_engine.cudnn_version(92000) == (9, 20, 0)


@pytest.mark.parametrize(
    ("override", "seconds"),
    [
        ("actor.recompute=none", 16384 / 36823),
        ("actor.recompute=full", 16384 / 30795),
        ("actor.fp8.recipe=blockwise", 16384 / 44460),
    ],
)
def test_what_an_update_is_predicted_to_take_is_what_plan_says(tmp_path: Path, override: str, seconds: float) -> None:
    """The figures of docs/gpu.md, which `plan` gave for one micro-batch of this shape."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    config = load_recipe(path, [f"run_dir={tmp_path}", "model.path=x", override])
    found = speed.predicted_seconds("NVIDIA H200", speed._8B, config, [4096] * 4)
    assert found == pytest.approx(seconds, rel=0.01)
    assert speed.predicted_seconds("NVIDIA L40S", speed._8B, config, [4096] * 4) is None
    both = [speed.predicted_seconds(f"NVIDIA {name}", speed._8B, config, [4096] * 4) for name in ("B200", "GB200")]
    assert both[0] != both[1], "B200 is in GB200, too"
    assert speed.of_card("NVIDIA H100 PCIe", speed._PEAKS) == "H100 PCIe"
    assert speed.of_card("NVIDIA H100 80GB HBM3", speed._PEAKS) == "H100"
