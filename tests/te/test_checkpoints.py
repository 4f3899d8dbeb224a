"""Checkpoints of a run with Transformer Engine's layers and its fused Adam, whose state is empty before the first step and
whose number of steps lies in the parameter groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.actor.layouts import make_models
from tests.checkpoint.ranks import Layout, contents, resume_at, save_trained
from tests.te import inside
from tests.te.processes import spawn

pytestmark = pytest.mark.ranks
BF16 = "bfloat16"
MOMENTS = Layout(tensor=2, sequence=True, dtype=BF16, moments=BF16)
PLAIN = Layout(tensor=2, distributed=False, dtype=BF16)
EXPERTS = Layout(model="model-experts", expert=2, dtype=BF16)
FP32 = Layout(tensor=2, sequence=True)
HOST = Layout(dtype=BF16, device="cpu")  # data parallel 2
SAVED = [MOMENTS, PLAIN, EXPERTS, FP32, HOST]
AGAIN = [MOMENTS, PLAIN, EXPERTS, HOST]
SAME = [(layout, layout) for layout in AGAIN]
OTHER = [
    (MOMENTS, Layout(pipeline=2, dtype=BF16)),  # whose moments are in fp32
    (FP32, Layout()),  # data parallel 2
    (EXPERTS, Layout(model="model-experts", tensor=2, sequence=True, expert=2, dtype=BF16)),
    (EXPERTS, replace(EXPERTS, device="cpu")),
    (HOST, Layout(tensor=2, sequence=True, dtype=BF16)),  # with the fused Adam
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    make_models(folder, layers=2)
    (folder / "again").mkdir()
    spawn(save_trained, 2, str(folder), SAVED)
    spawn(inside.save_before_the_first_update, 2, str(folder), AGAIN)
    (folder / "offloaded").mkdir()
    spawn(inside.learn_offloaded, 2, str(folder), SAVED[:3:2])
    spawn(resume_at, 2, str(folder), SAME + OTHER)
    return folder


@pytest.mark.parametrize("layout", AGAIN, ids=lambda layout: layout.name)
def test_back_to_step_0_by_another_optimizer(root: Path, layout: Layout) -> None:
    start = contents(root / "again" / layout.name / "step_0")
    moments = [tensor for name, tensor in start.items() if "exp_avg" in name]
    assert moments
    assert not any(tensor.any() for tensor in moments)
    want, own = contents(root / layout.name / "step_2"), contents(root / "again" / layout.name / "step_2")
    assert own.keys() == want.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("layout", SAVED[:3:2], ids=lambda layout: layout.name)
def test_state_that_was_on_the_host_in_between_is_the_same(root: Path, layout: Layout) -> None:
    want, own = contents(root / layout.name / "step_2"), contents(root / "offloaded" / layout.name / "step_2")
    assert own.keys() == want.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize(("before", "after"), SAME + OTHER, ids=lambda layout: layout.name)
def test_resuming(root: Path, before: Layout, after: Layout) -> None:
    """What is loaded is what was saved; two updates later all is as if it had not been stopped."""
    for step in ("step_1", "step_2"):
        want, own = contents(root / before.name / step), contents(root / f"{before.name}--{after.name}" / step)
        assert own.keys() == want.keys()
        for name, tensor in want.items():
            rows = min(len(tensor), len(own[name]))  # the vocabulary is padded to the layout
            there, here = tensor[:rows].double(), own[name][:rows].double()
            if step == "step_1" or before == after:
                assert torch.equal(here, there), name
            else:
                bound = 1e-5 if before.dtype == "float32" else 0.3 if "exp_avg" in name else 1e-2
                assert (here - there).norm() < bound * there.norm().clamp(min=1e-30), name
