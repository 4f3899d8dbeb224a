"""Qwen3-VL's config.json and its layouts: what is refused, and how the axes of a position take turns."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import ConfigError, check, load_recipe
from megatron_rl.config.published import published_config
from megatron_rl.models import model_of
from megatron_rl.models.qwen3_vl import interleaved

ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
DENSE, MIXTURE = "Qwen3-VL-8B-Instruct", "Qwen3-VL-30B-A3B-Instruct"
RECIPE = Path(__file__).parents[2] / "recipes/scale/qwen3-vl-8b.yaml"


@pytest.mark.parametrize("sections", [(24, 20, 20), (8, 4, 4), (4, 6, 6), (11, 11, 10)])
def test_runs_give_each_pair_the_axis_that_transformers_gives_it(sections: tuple[int, int, int]) -> None:
    pairs = sum(sections)
    expected = [0] * pairs
    for axis in (1, 2):
        places = range(axis, min(3 * sections[axis], pairs), 3)
        expected = [axis if pair in places else own for pair, own in enumerate(expected)]
    runs = interleaved(sections)
    assert [number % 3 for number, run in enumerate(runs) for _ in range(run)] == expected
    assert len(runs) % 3 == 0  # Megatron-Core lays them end to end twice


@pytest.mark.parametrize(
    ("name", "section", "changes", "message"),
    [
        (DENSE, "text_config", {"rope_scaling": {**ROPE, "mrope_interleaved": False}}, "mrope_interleaved"),
        (DENSE, "text_config", {"rope_scaling": {**ROPE, "mrope_section": [24, 20, 21]}}, "add up to half of head_dim"),
        (DENSE, "text_config", {"rope_scaling": {**ROPE, "rope_type": "yarn"}}, "'yarn': positions in three axes"),
        (DENSE, "text_config", {"attention_bias": True}, "attention_bias"),
        (DENSE, "text_config", {"sandwich_norm": True}, "sandwich_norm"),
        (MIXTURE, "text_config", {"norm_topk_prob": False}, "norm_topk_prob"),
        (MIXTURE, "text_config", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (DENSE, "vision_config", {"deepstack_visual_indexes": [16, 8]}, "deepstack_visual_indexes` = .16, 8."),
        (DENSE, "vision_config", {"deepstack_visual_indexes": [27]}, "blocks of the tower's 27"),
        (DENSE, "vision_config", {"deepstack_visual_indexes": 8}, "deepstack_visual_indexes` = 8"),
        (DENSE, "vision_config", {"hidden_act": "silu"}, "hidden_act"),
        (DENSE, "vision_config", {"out_hidden_size": 2048}, "out_hidden_size"),
        (DENSE, "vision_config", {"window_size": 112}, "window_size"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, section: str, changes: dict[str, Any], message: str) -> None:
    config: dict[str, Any] = copy.deepcopy(published_config(name)) or {}
    config[section] |= changes
    with pytest.raises(ValueError, match=message):
        model_of(config)


def test_the_layers_that_the_tower_feeds_are_on_the_first_stage() -> None:
    """Chunks of 2 layers are too small for a tower that feeds 3, and chunks of 3 are enough."""
    refusals = []
    for pipeline in (6, 9):
        layout = f"actor.parallel={{tensor: 1, sequence: false, pipeline: {pipeline}, virtual_pipeline: 2}}"
        with pytest.raises(ConfigError) as refusal:  # the model's folder is not here
            check(load_recipe(RECIPE, [layout]))
        refusals.append(str(refusal.value))
    fed = "feeds the model's first 3 layers (deepstack_visual_indexes in its config.json), and the first stage begins with"
    assert fed not in refusals[0]
    assert f"{fed} 2; lower `actor.parallel.pipeline` or `virtual_pipeline`" in refusals[1]
