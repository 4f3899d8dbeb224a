"""Promise 1: no layout, micro-batch size or packing changes loss, gradients or updated weights.

Every layout makes two updates on the same batch, with the trainer's own `update` and the real policy loss, clipping of the
gradient norm in force, and is compared with one process. See `layouts.LINEAR_ADAM` for the choice of optimizer: the change
of a weight is there proportional to its gradient, so comparing changes compares gradients, in Hugging Face's names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.models import family_for, read_hf_config
from megatron_rl.weights.files import SafetensorsFolder
from megatron_rl.weights.stacked import opened
from tests.tolerance import GATED_DELTA, RELATIVE, differing

from .layouts import LINEAR_ADAM, MODES, Layout, distance, make_models, measure_alone, one_of_each_family, run_layouts
from .processes import spawn

CORRECTED = {
    "kl": {"coef": 0.1},
    "entropy_coef": 0.05,
    "ratio": "sequence",
    "correction": {"weight": "token", "filters": [{"level": "geometric", "low": 0.8, "high": 1.3}]},
}
ALONE = [Layout("alone", modes=MODES), Layout("alone corrected", section=CORRECTED), Layout("alone tied", tied=True)]
ALONE += [Layout("alone experts", experts=True), Layout("alone replayed", experts=True, replay=True)]
ALONE += [Layout("alone given", experts=True, given=True), Layout("alone images", images=True)]
ALONE += [Layout("a token dropped", dropped=True)]
ONE = [Layout("one micro-batch", tokens_per_microbatch=4096), Layout("tight", tokens_per_microbatch=60)]
SELECTIVE, FULL, OVERLAP = {"recompute": "selective"}, {"recompute": "full"}, {"overlap": True}
FROZEN = {"freeze_vision_tower": True}
ALONE += [Layout("alone frozen", images=True, actor=FROZEN), Layout("alone deepstack", deepstack=True)]
ALONE += [Layout("alone deepstack frozen", deepstack=True, actor=FROZEN)]
ALONE += [Layout("alone deepstack experts", deepstack=True, experts=True)]
ONE += [
    Layout("recompute feed-forwards", actor=SELECTIVE),
    Layout("recompute attention", actor={**SELECTIVE, "recompute_modules": ["core_attn"]}),
    Layout("recompute experts", experts=True, actor=SELECTIVE),
    Layout("recompute experts, replayed", experts=True, replay=True, actor=SELECTIVE),
    Layout("recompute full, images", images=True, actor=FULL),
    Layout("recompute full, deepstack", deepstack=True, actor=FULL, tokens_per_microbatch=40),
    Layout("recompute full, replayed", experts=True, replay=True, actor=FULL),
    Layout("recompute full", actor=FULL),
    Layout("latents, recompute full", variant="deepseek_v3", actor=FULL),
    Layout("latents, one micro-batch", variant="deepseek_v3", tokens_per_microbatch=4096),
    Layout("recompute two layers", actor={**FULL, "recompute_layers": 2}),
]
TWO = [
    Layout("TP 2", tensor=2, modes=MODES),
    Layout("TP 2 corrected", tensor=2, section=CORRECTED),
    Layout("TP 2 sequence", tensor=2, sequence=True),
    Layout("TP 2 sequence tied", tensor=2, sequence=True, tied=True),
    Layout("TP 2 images", tensor=2, images=True, tokens_per_microbatch=40),
    Layout("TP 2 sequence images", tensor=2, sequence=True, images=True),
    Layout("PP 2 images", pipeline=2, images=True),
    Layout("TP 2 sequence deepstack, recompute full", tensor=2, sequence=True, deepstack=True, actor=FULL),
    Layout("EP 2 deepstack", expert=2, experts=True, deepstack=True, tokens_per_microbatch=40),
    Layout("TP 2 deepstack", tensor=2, deepstack=True, tokens_per_microbatch=40),
    Layout("PP 2 deepstack, recompute full", pipeline=2, deepstack=True, tokens_per_microbatch=40, actor=FULL),
    Layout("DP 2 overlap images", images=True, tokens_per_microbatch=40, actor=OVERLAP),
    Layout("DP 2 overlap frozen", images=True, tokens_per_microbatch=40, actor={**OVERLAP, **FROZEN}),
    Layout("DP 2", modes=MODES),
    Layout("DP 2 corrected", section=CORRECTED),
    Layout("DP 2 tied", tied=True),
    Layout("DP 2 plain optimizer", distributed=False),
    Layout("DP 2 overlap tied", tied=True, actor=OVERLAP),
    Layout("DP 2 overlap plain optimizer", distributed=False, actor=OVERLAP),
    Layout("EP 2 overlap", experts=True, expert=2, actor=OVERLAP),
    Layout("DP 2 large micro-batches", tokens_per_microbatch=4096),
    Layout("EP 2", experts=True, expert=2),
    Layout("EP 2 recompute full", experts=True, expert=2, actor=FULL),
    Layout("TP 2 sequence recompute full", tensor=2, sequence=True, actor=FULL),
    Layout("DP 2 experts", experts=True),
    Layout("TP 2 EP 2 replayed", tensor=2, sequence=True, experts=True, expert=2, replay=True),
    Layout("PP 2 virtual 2 replayed, recompute full", pipeline=2, virtual=2, experts=True, replay=True, actor=FULL),
    Layout("TP 2 EP 2 given", tensor=2, sequence=True, experts=True, expert=2, given=True),
    Layout("PP 2 virtual 2 given, recompute full", pipeline=2, virtual=2, experts=True, given=True, actor=FULL),
    Layout("CP 2 given", context=2, experts=True, given=True),
    Layout("TP 2 EP 2 whole experts", tensor=2, sequence=True, experts=True, expert=2),
    Layout(
        "TP 2 EP 2 whole experts, plain optimizer", tensor=2, sequence=True, experts=True, expert=2, distributed=False
    ),
    Layout("TP 2 whole experts", tensor=2, sequence=True, experts=True),
    Layout("TP 2 whole experts, plain optimizer", tensor=2, sequence=True, experts=True, distributed=False),
    Layout("TP 2 ETP 2", tensor=2, sequence=True, experts=True, expert_tensor=2),
    Layout("DP 2 ETP 2", experts=True, expert_tensor=2),
    Layout("PP 2 experts", experts=True, pipeline=2),
    Layout("CP 2", context=2, modes=MODES),
    Layout("CP 2 tied", context=2, tied=True),
    Layout("CP 2 corrected", context=2, section=CORRECTED),
    Layout("CP 2 EP 2", context=2, experts=True, expert=2),
    Layout("PP 2", pipeline=2),
    Layout("PP 2 tied", pipeline=2, tied=True),
    Layout("PP 2 virtual 3", pipeline=2, virtual=3),
    Layout("PP 2 virtual 2 uneven", pipeline=2, virtual=2),  # chunks of 1, 2, 2 and 1 layers
    Layout("PP 2 virtual 2 latents", pipeline=2, virtual=2, variant="deepseek_v3"),
    Layout("CP 2 latents", context=2, variant="deepseek_v3"),
    Layout("CP 2 gated delta", context=2, variant="qwen3_5"),
    Layout("DP 2 latents", variant="deepseek_v3"),
    Layout("PP 2 sinks", pipeline=2, variant="gpt_oss"),
    Layout("TP 2 biases", tensor=2, sequence=True, variant="glm4_moe"),
    Layout("PP 2 virtual 3 corrected", pipeline=2, virtual=3, section=CORRECTED),
]
FOUR = [
    Layout("TP 2 PP 2", tensor=2, pipeline=2),
    Layout("TP 2 sequence PP 2 virtual 3 tied", tensor=2, sequence=True, pipeline=2, virtual=3, tied=True),
    Layout("PP 4 uneven tied", pipeline=4, tied=True),  # 1, 2, 2 and 1 layers
    Layout("TP 2 sequence CP 2 tied", tensor=2, sequence=True, context=2, tied=True),
    Layout("PP 2 CP 2", pipeline=2, context=2),
    Layout("PP 2 virtual 3 DP 2 overlap tied", pipeline=2, virtual=3, tied=True, actor=OVERLAP),
    Layout("CP 2 DP 2 plain optimizer", context=2, distributed=False),
    Layout("PP 2 DP 2 corrected", pipeline=2, section=CORRECTED),
    Layout("TP 2 EP 2 ETP 2", tensor=2, sequence=True, experts=True, expert=2, expert_tensor=2),
    Layout("TP 2 DP 2 EP 2", tensor=2, sequence=True, experts=True, expert=2),
    Layout("TP 2 DP 2 EP 4", tensor=2, sequence=True, experts=True, expert=4),
    Layout("TP 2 PP 2 EP 2", tensor=2, pipeline=2, sequence=True, experts=True, expert=2),
    Layout("TP 2 PP 2 EP 2 latents", tensor=2, pipeline=2, sequence=True, expert=2, variant="deepseek_v3"),
    Layout("TP 2 CP 2 EP 4", tensor=2, context=2, sequence=True, experts=True, expert=4),
    Layout("PP 2 virtual 2 EP 2", pipeline=2, virtual=2, experts=True, expert=2),
    Layout("PP 2 CP 2 EP 2", pipeline=2, context=2, experts=True, expert=2),
]
# Every family, those to come too, over tensor-parallel ranks: which gradients are summed over them, and which count once for
# the norm, Megatron-Core says per parameter, and says it wrongly of some families' (docs/upstream.md).
for variant, mixture in one_of_each_family().items():
    ALONE.append(Layout(f"alone {variant}", variant=variant))
    TWO.append(Layout(f"TP 2 sequence {variant}", variant=variant, tensor=2, sequence=True, expert=2 if mixture else 1))
    if not mixture:
        TWO.append(Layout(f"TP 2 {variant}", variant=variant, tensor=2))
    elif variant != "gpt_oss":  # whose experts have biases: refused
        TWO.append(Layout(f"ETP 2 {variant}", variant=variant, expert_tensor=2))
# Ranks have shares of its gradient only, of which a micro-batch's variance is measured in passes of its own.
SPLIT = {
    *("TP 2 sequence tied", "EP 2", "DP 2 ETP 2", "CP 2", "PP 2 tied", "PP 2 virtual 3", "TP 2 EP 2 replayed"),
    *("TP 2 sequence PP 2 virtual 3 tied", "PP 2 CP 2 EP 2", "TP 2 PP 2 EP 2 latents"),
}
TWO, FOUR = ([replace(layout, measured=layout.name in SPLIT) for layout in layouts] for layouts in (TWO, FOUR))
MEASURED = [layout for layout in TWO + FOUR if layout.measured]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every layout's results lie: `<name>.pt`."""
    root = tmp_path_factory.mktemp("layouts")
    make_models(root)
    spawn(run_layouts, 1, str(root), ALONE + ONE)
    spawn(run_layouts, 2, str(root), TWO)
    spawn(run_layouts, 4, str(root), FOUR)
    spawn(measure_alone, 1, str(root), MEASURED)
    return root


def _load(root: Path, name: str) -> dict[str, Any]:
    return torch.load(root / f"{name}.pt", weights_only=True)


def _start(root: Path, model: str) -> dict[str, torch.Tensor]:
    files = opened(SafetensorsFolder(root / model), family_for(read_hf_config(root / model)))
    return {name: files.read(name, 0, 0, files.shape(name)[0]) for name in files.names()}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ONE + TWO + FOUR, ids=lambda layout: layout.name)
def test_a_layout_learns_what_one_process_learns(root: Path, layout: Layout) -> None:
    results, start = _load(root, layout.name), _start(root, layout.model)
    names = {
        f" {layout.variant}": bool(layout.variant),
        " corrected": bool(layout.section),
        " tied": layout.tied,
        " replayed": layout.replay,
        " given": layout.given,
        " deepstack experts": layout.deepstack and layout.experts,
        " experts": layout.experts,
        " frozen": layout.actor.keys() >= FROZEN.keys(),
        " images": layout.images,
        " deepstack": layout.deepstack,
    }
    kind = next((name for name, applies in names.items() if applies), "")
    wanted = _load(root, f"alone{kind}")
    assert set(results) == set(layout.modes)
    for mode, result in results.items():
        want = wanted[mode]
        times = GATED_DELTA if layout.variant.startswith("qwen3_5") else 1.0
        assert differing(result["metrics"], want["metrics"], times) == [], mode
        assert result["weights"].keys() == want["weights"].keys() == start.keys()
        for name, weight in want["weights"].items():
            own = result["weights"][name]
            assert distance(own, weight) < RELATIVE, f"{mode}: {name}"
            assert distance(own - start[name], weight - start[name]) < RELATIVE, f"{mode}: the change of {name}"


@pytest.mark.ranks
@pytest.mark.parametrize("layout", MEASURED, ids=lambda layout: layout.name)
def test_a_layout_measures_the_variance_that_one_process_measures(root: Path, layout: Layout) -> None:
    """Over the same parts, whose gradients the one process measures while it accumulates them; the test above shows that
    what a measured update learns is what others learn."""
    assert {layout.name for layout in MEASURED} == SPLIT
    wanted = _load(root, f"{layout.name} measured alone")
    for mode, result in _load(root, layout.name).items():
        found, want = result["variance"], wanted[mode]["variance"]
        assert found["gradient/parts"] == want["gradient/parts"] == len(result["parts"]) > 1
        for name in ("gradient/variance", "gradient/variance_share"):
            assert found[name] > 0
            assert found[name] == pytest.approx(want[name], rel=RELATIVE), (mode, name)


@pytest.mark.ranks
def test_the_comparison_sees_what_it_is_for(root: Path) -> None:
    """Every tensor moved far more than the tolerance, the modes differ, the norm was clipped, ratios left the bounds."""
    start, norms = _start(root, "model-False"), set()
    wanted = _load(root, "alone")
    for result in wanted.values():
        for name, weight in result["weights"].items():
            assert distance(weight, start[name]) > 100 * RELATIVE, name
        assert result["metrics"]["actor/grad_norm"] > LINEAR_ADAM.clip_grad
        assert result["metrics"]["actor/updates"] == 2
        assert 0 < result["metrics"]["loss/silent_token_share"] < 0.5
        norms.add(round(result["metrics"]["actor/grad_norm"], 4))
    assert len(norms) == len(MODES)
    corrected = _load(root, "alone corrected")["seq-mean-token-mean"]["metrics"]
    assert 0.1 < corrected["correction/dropped_share"] < 0.9
    assert 0.01 < corrected["correction/truncated_share"] < 0.99


# Metrics that one token less does not change: of no token, of tokens whose weight is 0 whatever happens, of another token.
BLIND = {"actor/lr", "actor/updates", "correction/dropped_share", "region_weight/LN", "region_weight/HP"}
BLIND |= {"mismatch/abs_log_ratio_max", "mismatch/abs_log_ratio_from_0"}


@pytest.mark.ranks
def test_a_single_token_that_is_dropped_is_seen_in_every_metric_that_it_is_in(root: Path) -> None:
    """The tolerances are far below what the smallest mistake changes."""
    wanted = _load(root, "alone")["seq-mean-token-mean"]
    found = _load(root, "a token dropped")["seq-mean-token-mean"]
    assert wanted["metrics"].keys() - set(differing(found["metrics"], wanted["metrics"])) == BLIND
    for name, weight in wanted["weights"].items():
        assert distance(found["weights"][name], weight) > RELATIVE, name


@pytest.mark.ranks
def test_replay_keeps_tokens_at_their_experts(root: Path) -> None:
    """The first update is the same, and moves some tokens' experts, so the second differs; the load is measured in both."""
    routed, replayed = (_load(root, f"alone {kind}")["seq-mean-token-mean"] for kind in ("experts", "replayed"))
    assert any(distance(replayed["weights"][name], weight) > RELATIVE for name, weight in routed["weights"].items())
    given = _load(root, "alone given")["seq-mean-token-mean"]  # at random, so both updates differ
    assert given["metrics"]["experts/load_max"] < routed["metrics"]["experts/load_max"]
    for result in (routed, replayed, given):
        assert 1 < result["metrics"]["experts/load"] < result["metrics"]["experts/load_max"] < 8 / 3


@pytest.mark.ranks
def test_every_layout_tells_which_experts_a_token_went_to(root: Path) -> None:
    wanted = _load(root, "alone given")["seq-mean-token-mean"]["choices"]
    assert len(torch.cat(wanted).flatten(0, 1).unique(dim=0)) > 8, "they differ"
    layouts = [layout.name for layout in TWO + FOUR if layout.given]
    assert {name[:2] for name in layouts} == {"TP", "PP", "CP"}
    for name in layouts:
        found = _load(root, name)["seq-mean-token-mean"]["choices"]
        for own, want in zip(found, wanted, strict=True):
            assert torch.equal(own.sort(dim=-1).values, want.sort(dim=-1).values), name


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "model", "tower"),
    [("images", "model-images", "visual."), ("deepstack", "model-deepstack-False", "model.visual.")],
)
def test_a_frozen_tower_stays_as_it_is_while_the_decoder_learns(root: Path, kind: str, model: str, tower: str) -> None:
    start, name = _start(root, model), "alone frozen" if kind == "images" else f"alone {kind} frozen"
    frozen, trained = (_load(root, each)["seq-mean-token-mean"]["weights"] for each in (name, f"alone {kind}"))
    assert frozen.keys() == trained.keys() == start.keys()
    for name, weight in frozen.items():
        assert torch.equal(weight, start[name]) == name.startswith(tower), name
    assert not any(torch.equal(weight, start[name]) for name, weight in trained.items())
