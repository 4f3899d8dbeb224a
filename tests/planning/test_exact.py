"""`plan --exact`: tensors without content take what real ranks take, and every recipe builds at its real size."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.config.published import published_config
from megatron_rl.config.schema import Config
from megatron_rl.models import model_of, registry
from megatron_rl.planning.components import GIB, Part
from megatron_rl.planning.memory import actor_parameters, checkpoint_bytes, make_plan
from tests.actor.processes import spawn
from tests.models.mixed import FAMILY, LAYERS
from tests.recipes.shipped import loaded, nodes, runnable

from .built import hold
from .planned_models import CASES, MOE, QWEN2_TIED, QWEN3, RECIPES, as_case, count, tiny

WORLD = 4
LLAMA = tiny("LlamaForCausalLM", head_dim=16)
VISION = {"depth": 2, "hidden_size": 48, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "window_size": 16}
SEEING = tiny(
    "Qwen2_5_VLForConditionalGeneration",
    rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]},
    vision_config={**VISION, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
)
DEEP = tiny(
    "Qwen3VLForConditionalGeneration",
    head_dim=16,
    rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    vision_config={
        **{name: size for name, size in VISION.items() if name != "window_size"},
        "out_hidden_size": 64,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0],
    },
)
FAMILIES = [QWEN2_TIED, QWEN3, LLAMA, MOE, SEEING, DEEP]
EXPERTS: list[dict[str, Any]] = [
    {"expert": 4},
    {"pipeline": 2, "expert": 2},
    {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2},
]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor": 4, "sequence": True},
    {"tensor": 2, "pipeline": 2, "sequence": True},
    {"pipeline": 4},  # five layers: 2, 1, 1 and 1
    {"pipeline": 2, "virtual_pipeline": 2},
    {"tensor": 2, "sequence": True},
    {"context": 2},
    *EXPERTS,
]
# Of a layout, and of the next one.
PRECISIONS = [(("float32", "true"), ("bfloat16", "false")), (("float32", "false"), ("bfloat16", "true"))]


def of_state() -> list[dict[str, Any]]:
    """Every layout in both dtypes, with the optimizer sharded in one and whole in the other; the families in turn."""
    cases = []
    for number, parallel in enumerate(LAYOUTS):
        families = [MOE] if parallel in EXPERTS else FAMILIES[: 4 if "context" in parallel else 6]
        layers = 4 if "virtual_pipeline" in parallel else 5
        for turn, (dtype, sharded) in enumerate(PRECISIONS[number % 2]):
            model = {**families[(2 * number + turn) % len(families)], "num_hidden_layers": layers}
            case = as_case({"model": model, "world": WORLD, "parallel": parallel, "dtype": dtype}, content=False)
            pipeline = parallel.get("pipeline", 1)
            case["overrides"].append(f"actor.optimizer.distributed={sharded}")
            cases.append(case | {"ranks": list(range(0, WORLD, WORLD // pipeline)), "micro_batches": 0})
    return cases


# Sizes at which activations outweigh what does not grow with them.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048, "num_hidden_layers": 4}
PASSES: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (QWEN3, {"tensor": 2, "sequence": True}, "float32", "none"),
    ({**MOE, "moe_intermediate_size": 128}, {"pipeline": 2, "expert": 2}, "bfloat16", "selective"),
    (LLAMA, {"pipeline": 2, "virtual_pipeline": 2}, "float32", "none"),
    (QWEN2_TIED, {"pipeline": 4}, "bfloat16", "full"),
]


def of_images() -> list[dict[str, Any]]:
    """A tower that outweighs its decoder, with content and without."""
    tower = {
        **SEEING["vision_config"],
        "depth": 3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "out_hidden_size": 256,
    }
    rope = {"type": "mrope", "mrope_section": [8, 4, 4]}
    model = {**SEEING, **WIDE, "vision_config": {**tower, "num_heads": 4}, "rope_scaling": rope}
    sizes = ["rollout.max_prompt_tokens=128", "rollout.max_tokens=128", "actor.tokens_per_microbatch=1024"]
    given = {"model": model, "world": 2, "parallel": {"pipeline": 2}, "dtype": "bfloat16"}
    cases = [as_case(given, content) | {"ranks": None, "fused": False} for content in (True, False)]
    return [case | {"overrides": [*case["overrides"], *sizes]} for case in cases]


def of_passes() -> list[dict[str, Any]]:
    """As many micro-batches as fill the pipeline."""
    sizes = ["rollout.max_prompt_tokens=64", "rollout.max_tokens=192", "actor.tokens_per_microbatch=1024"]
    cases = []
    for model, parallel, dtype, recompute in PASSES:
        given = {"model": {**model, **WIDE}, "world": WORLD, "parallel": parallel, "dtype": dtype}
        case = as_case(given, content=False) | {"ranks": None, "fused": False}
        case["overrides"] += [*sizes, f"actor.recompute={recompute}"]
        cases.append(case | {"micro_batches": 2 * parallel.get("pipeline", 1)})
    return cases


REFUSED = as_case(CASES[0], content=False) | {"overrides": ["actor.parallel.pipeline=3"], "world": 4}


@pytest.fixture(scope="module")
def counted() -> dict[str, list[Any]]:
    """All in one process, most of whose time is imports."""
    cases = {
        "state": of_state(),
        "passes": of_passes(),
        "recipes": [as_counted(*recipe) for recipe in of_recipes()],
        "choices": [as_counted(*recipe, *overrides) for *recipe, overrides in of_choices()],
        "optimizers": [as_counted(*recipe, *overrides) for *recipe, overrides in of_optimizers()],
        "mixed": [as_counted(*of_mixed())],
        "refused": [REFUSED],
        "images": of_images(),
    }
    found = iter(count([case for kind in cases.values() for case in kind]))
    return {kind: [next(found) for _ in of_kind] for kind, of_kind in cases.items()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, int]]]]:
    """What the ranks of a real world hold, of each case."""
    folder = tmp_path_factory.mktemp("built")
    cases = [(load_recipe(case["recipe"], case["overrides"]), case) for case in of_state() + of_passes()]
    spawn(hold, WORLD, str(folder), cases)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    held = [list(of_case) for of_case in zip(*ranks, strict=True)]
    count = len(of_state())
    return {"state": held[:count], "passes": held[count:]}


@pytest.mark.ranks
def test_state_is_that_of_real_ranks_to_the_byte(counted: dict[str, list[Any]], built: dict[str, list[Any]]) -> None:
    shards = set()
    for case, own, real in zip(of_state(), counted["state"], built["state"], strict=True):
        assert not isinstance(own, str), own
        for rank, held in enumerate(real):
            stage, place = divmod(rank, WORLD // len(own))
            expected = own[stage] | {"optimizer_bytes": own[stage]["of_stage"][place]}
            for part in ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
                assert expected[part] == held[part], (case["overrides"], rank, part)
            shards.add(len(set(own[stage]["of_stage"])))
    assert max(shards) > 1  # ranks whose shards differ


@pytest.mark.ranks
def test_passes_take_what_they_take_in_a_real_run(counted: dict[str, list[Any]], built: dict[str, list[Any]]) -> None:
    for case, own, real in zip(of_passes(), counted["passes"], built["passes"], strict=True):
        assert not isinstance(own, str), own
        for memory in own:
            held = real[memory["rank"]]
            # Beside a forward pass the interleaved schedule keeps hidden states, which in small models are not small.
            for part, near in (("load_bytes", 0.1), ("update_bytes", 0.1), ("forward_bytes", 0.2)):
                assert memory[part] == pytest.approx(held[part], rel=near), (case["overrides"], part, memory, held)


def test_a_vision_tower_takes_what_it_takes_with_content(counted: dict[str, list[Any]]) -> None:
    real, own = counted["images"]
    assert len(own) == 2
    for stage, (with_content, without) in enumerate(zip(real, own, strict=True)):
        for part in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            assert without[part] == with_content[part]
        for part in ("forward_bytes", "update_bytes", "check_bytes"):
            assert without[part] == pytest.approx(with_content[part], rel=0.1), (stage, part)
    assert own[0]["update_bytes"] > 2 * own[1]["update_bytes"]  # the tower is on the first stage


@pytest.mark.ranks
def test_a_checkpoint_copies_what_is_planned(built: dict[str, list[Any]]) -> None:
    """In the mean of the first stage's ranks; pieces of a small model do not divide evenly over them."""
    for case, real in zip(of_passes(), built["passes"], strict=True):
        config, model = load_recipe(case["recipe"], [*case["overrides"], "checkpoint.every=1"]), model_of(case["model"])
        parallel, width = config.actor.parallel, 4 if config.model.dtype == "float32" else 2
        sizes = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
        parameters = actor_parameters(model, **{name: getattr(parallel, name) for name in sizes})
        ranks = real[: WORLD // parallel.pipeline]
        copied = sum(rank["snapshot_bytes"] for rank in ranks) / len(ranks)
        assert copied == pytest.approx(checkpoint_bytes(config, parameters, WORLD, width), rel=0.02), case["overrides"]


@functools.cache
def of_recipes() -> list[tuple[str, int, dict[str, Any]]]:
    """Recipe, GPUs and the model's config.json of recipes that name GPUs, one of each architecture and layout."""
    found: dict[str, tuple[str, int, dict[str, Any]]] = {}
    for name in runnable():
        config = loaded(name)
        if config.model.path is None or config.launch.generators is not None:
            continue
        model = published_config(Path(config.model.path).name)
        assert model is not None, name
        world = 8 * nodes(name)
        actor = config.actor
        key = json.dumps(
            [
                *(model["architectures"], model.get("tie_word_embeddings"), vars(actor.parallel)),
                *(actor.recompute, actor.recompute_modules, actor.optimizer.distributed),
                *(actor.lora is not None, actor.fp8 is not None),
            ]
        )
        found.setdefault(key, (name, world, dict(model)))
    return list(found.values())


def as_counted(name: str, world: int, model: dict[str, Any], *overrides: str) -> dict[str, Any]:
    case = {"recipe": str(RECIPES / name), "overrides": overrides, "model": model, "world": world, "ranks": None}
    return case | {"fused": True, "content": False}


def of_choices() -> list[tuple[str, int, dict[str, Any], tuple[str, ...]]]:
    """Every way to recompute, of a dense model and of one with experts, each with fewer layers."""
    ways = {
        "awpo/qwen3-1.7b": ("none", "full", "selective"),
        "scale/qwen3-30b-a3b": ("none", "selective moe", "selective moe_act,layernorm"),
    }
    found = []
    for wanted, choices in ways.items():
        name, world, model = next(recipe for recipe in of_recipes() if recipe[0].startswith(wanted))
        for way, *modules in map(str.split, choices):
            overrides = (f"actor.recompute={way}", *(f"actor.recompute_modules=[{names}]" for names in modules))
            found.append((name, world, {**model, "num_hidden_layers": 4}, overrides))
    return found


def of_mixed() -> tuple[str, int, dict[str, Any], str]:
    """Dense layers on the first stage, experts on the second."""
    model = {
        **published_config("Qwen3-30B-A3B"),
        "architectures": [FAMILY.architectures[0]],
        "num_hidden_layers": LAYERS,
    }
    return "scale/qwen3-30b-a3b.yaml", 8, model, "actor.parallel={pipeline: 2, expert: 4}"


def of_optimizers() -> list[tuple[str, int, dict[str, Any], tuple[str, ...]]]:
    """A dense model, with the optimizer as it is, its moments in bf16, and the optimizer on the CPU."""
    name, world, model = next(recipe for recipe in of_recipes() if recipe[0].startswith("awpo/qwen3-1.7b"))
    ways: tuple[tuple[str, ...], ...] = ((), ("actor.optimizer.moments=bfloat16",), ("actor.optimizer.device=cpu",))
    return [(name, world, {**model, "num_hidden_layers": 4}, way) for way in ways]


def test_kinds_of_optimizer_take_what_the_arithmetic_says(counted: dict[str, list[Any]]) -> None:
    sizes, loads = [], []
    for (name, world, model, overrides), ranks in zip(of_optimizers(), counted["optimizers"], strict=True):
        assert not isinstance(ranks, str), f"{overrides}: {ranks}"
        said = parts(load_recipe(RECIPES / name, [*overrides, "actor.offload=true"]), model, world)
        [found] = {(rank["optimizer_bytes"], rank["optimizer_away_bytes"], rank["load_bytes"]) for rank in ranks}
        assert found[0] == pytest.approx(said.get(Part.OPTIMIZER, 0), rel=0.02)
        assert said[Part.HOST_OPTIMIZER] <= found[1] < 1.15 * said[Part.HOST_OPTIMIZER]
        assert said.get(Part.LOADING, 0) == pytest.approx(found[2], rel=0.02, abs=GIB / 16)
        sizes.append(found[0])
        loads.append(found[2])
    assert sizes[1] == pytest.approx(sizes[0] * 8 / 12, rel=1e-4)
    assert sizes[2] == 0
    assert loads[2] > 0  # weights beside their buffer, which an optimizer is no larger than any more


def test_the_arithmetic_is_near_what_is_counted_of_every_layout(counted: dict[str, list[Any]]) -> None:
    """State within 2 %, passes within 10 %."""
    for (name, world, model), ranks in zip(of_recipes(), counted["recipes"], strict=True):
        assert not isinstance(ranks, str), f"{name}: {ranks}"
        sizes = parts(loaded(name), model, world)
        fullest = max(ranks, key=lambda rank: rank["parameters"])
        assert fullest["parameter_bytes"] == sizes[Part.WEIGHTS], name
        assert fullest["fp8_bytes"] == sizes.get(Part.FP8_COPIES, 0), name
        assert fullest["gradient_bytes"] == pytest.approx(sizes[Part.GRADIENTS], rel=0.02), name
        assert fullest["optimizer_bytes"] == pytest.approx(sizes[Part.OPTIMIZER], rel=0.02), name
        most = max(rank["update_bytes"] for rank in ranks)
        if "vision_config" in model:  # the arithmetic leaves out a tower's passes
            assert sizes[Part.WEIGHTS] + sizes[Part.GRADIENTS] + sizes[Part.OPTIMIZER] + most < 70 * GIB, name
            continue
        assert sizes[Part.ACTIVATIONS] + sizes[Part.HEAD] == pytest.approx(most, rel=0.1), name
        assert sizes.get(Part.LOADING, 0) == pytest.approx(fullest["load_bytes"], rel=0.02, abs=GIB / 16), name
        assert 0.5 < sizes[Part.FORWARD] / max(rank["forward_bytes"] for rank in ranks) < 1.3, name
        assert all(rank["sync_bytes"] <= sizes[Part.BUCKETS] for rank in ranks), name


def test_the_arithmetic_is_near_what_is_counted_of_every_way_to_recompute(counted: dict[str, list[Any]]) -> None:
    for (name, world, model, overrides), ranks in zip(of_choices(), counted["choices"], strict=True):
        assert not isinstance(ranks, str), f"{name} {overrides}: {ranks}"
        sizes = parts(load_recipe(RECIPES / name, overrides), model, world)
        most = max(rank["update_bytes"] for rank in ranks)
        assert sizes[Part.ACTIVATIONS] + sizes[Part.HEAD] == pytest.approx(most, rel=0.1), (name, overrides)


def test_stages_whose_layers_differ(counted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", (FAMILY,))
    (name, world, model, layout), [ranks] = of_mixed(), counted["mixed"]
    sizes = parts(load_recipe(RECIPES / name, [layout]), model, world)
    for stage in range(2):
        [parameters] = {rank["parameters"] for rank in ranks if rank["stage"] == stage}
        assert parameters == actor_parameters(model_of(model), pipeline=2, expert=4, stage=stage).total
    most = max(rank["update_bytes"] for rank in ranks)
    assert sizes[Part.ACTIVATIONS] + sizes[Part.HEAD] == pytest.approx(most, rel=0.1)


def parts(config: Config, model: dict[str, Any], world: int) -> dict[str, float]:
    return {one.part: one.bytes for one in make_plan(config, model_of(model), world, 79 * GIB).components}


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_rl", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def test_the_command() -> None:
    recipe = str(RECIPES / "scale" / "qwen3-8b.yaml")
    done = plan(recipe, "--nodes", "1", "--exact", "--json", "actor.tokens_per_microbatch=9216", "actor.recompute=full")
    assert done.returncode == 0, done.stderr
    [ranks] = json.loads(done.stdout)["rank_classes"]
    assert (ranks["rank"], ranks["ranks"], ranks["parameters"]) == (0, 8, 4_095_521_792)
    assert ranks["parameter_bytes"] == 2 * ranks["parameters"]
    phases = {name: phase["peak_bytes"] for name, phase in ranks["phases"].items()}
    assert list(phases) == [
        *("load", "generate", "old_log_probs", "update", "sync", "sync_check", "offload", "checkpoint"),
    ]
    assert phases["update"] > phases["old_log_probs"] > phases["load"] > phases["sync"] > 2 * ranks["parameter_bytes"]
    assert ranks["optimizer_bytes"] <= phases["offload"] < 1.1 * ranks["optimizer_bytes"]
    assert phases["update"] > sum(ranks[f"{part}_bytes"] for part in ("parameter", "gradient"))
    assert "rank_classes" not in json.loads(plan(recipe, "--json", "--nodes", "1").stdout)  # the predicted step alone


def test_what_megatron_refuses_is_refused_with_its_reason(counted: dict[str, list[Any]]) -> None:
    assert counted["refused"] == ["rank 0 of 4 cannot be built: world_size (4) is not divisible by 3"]
