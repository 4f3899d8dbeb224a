"""A layout's micro-batches against operations and bytes that are counted otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.config.actor import ActorConfig, LoRAConfig, OptimizerConfig, ParallelConfig
from megatron_rl.config.published import published_config
from megatron_rl.models import Model, model_of
from megatron_rl.planning.memory import actor_parameters
from megatron_rl.planning.time.hardware import TABLES, Hardware, parse
from megatron_rl.planning.time.training import Training

# Nothing but operations: everything else is free.
FREE = {"memory": 1e30, "nvlink": 1e30, "network": 1e30, "launch": 1e-30, "message": 1e-30, "network_message": 1e-30}
IDEAL = replace(TABLES["h100"], **FREE, product_share=1.0, attention_share=1.0, host_dense=1e-30, host_experts=1e-30)


def model(name: str) -> Model:
    found = published_config(name)
    assert found is not None
    return model_of(found)


def training(name: str, hardware: Hardware, world: int, actor: ActorConfig | None = None, **layout: int) -> Training:
    actor = actor or ActorConfig(parallel=ParallelConfig(**layout, sequence=layout.get("tensor", 1) > 1))  # type: ignore[arg-type]
    return Training(model(name), actor, world, hardware, imbalance=1.0)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_products_are_six_operations_per_parameter_and_token(name: str) -> None:
    tokens = 2**22  # so many that no tile is partly filled
    made = training(name, IDEAL, 1)
    cost = made.passes(1, tokens, 0, train=True)
    parameters = actor_parameters(made.model)
    dims = made.model.dims
    experts = made.model.experts
    used = parameters.linear + parameters.expert * (experts.top_k / experts.count if experts else 0)
    logits = dims["vocab"] * dims["hidden"]
    operations = 6 * tokens * used + 8 * tokens * logits  # logits are computed twice
    assert cost.products == pytest.approx(operations / IDEAL.bf16, rel=0.2)  # sums take time to begin
    assert cost.products >= operations / IDEAL.bf16


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"context": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}])
def test_ranks_share_the_work(layout: dict[str, int]) -> None:
    ranks = 4
    whole = training("Qwen3-8B", IDEAL, 1).passes(32, 2**18, 1e9, train=True)
    cut = training("Qwen3-8B", IDEAL, ranks, **layout).passes(32, 2**18, 1e9, train=True)
    share = ranks // training("Qwen3-8B", IDEAL, ranks, **layout).data_parallel
    assert cut.products + cut.attention == pytest.approx((whole.products + whole.attention) / share, rel=0.15)


def test_the_bubble_is_one_micro_batch_less_than_there_are_stages() -> None:
    even = training("Qwen3-8B", IDEAL, 4, pipeline=4)
    cost = even.passes(8, 2**14, 0, train=True)
    one = even.passes(9, 2**14, 0, train=True).seconds - cost.seconds
    assert 0 < cost.bubble <= 3 * one
    virtual = training("Qwen3-8B", IDEAL, 4, pipeline=4, virtual_pipeline=3)
    assert virtual.passes(8, 2**14, 0, train=True).bubble == pytest.approx(cost.bubble / 3)


def test_what_is_computed_again_takes_time() -> None:
    def seconds(actor: ActorConfig) -> float:
        return training("Qwen3-8B", TABLES["h100"], 8, actor).passes(1, 16384, 1e8, train=True).seconds

    none, some, full = (seconds(ActorConfig(recompute=mode)) for mode in ("none", "selective", "full"))
    few = seconds(ActorConfig(recompute="full", recompute_layers=9))
    assert none < some < full
    assert none < few < full
    assert full == pytest.approx(none * 4 / 3, rel=0.06)


def test_experts_across_nodes_exchange_more_slowly() -> None:
    near, far = (training("Qwen3-30B-A3B", TABLES["h100"], 32, expert=expert) for expert in (8, 32))
    assert far.forward(16384, 1e8).experts > 4 * near.forward(16384, 1e8).experts
    one_domain = replace(far, hardware=TABLES["gb200"])
    assert one_domain.forward(16384, 1e8).experts < near.forward(16384, 1e8).experts


def test_values_of_hardware_can_be_replaced() -> None:
    assert parse("h200,network=25e9") == replace(TABLES["h200"], network=25e9)
    for text, why in (("h10", "did you mean"), ("h100,netwrk=1", "'network'"), ("h100,network=-1", "above 0")):
        with pytest.raises(ConfigError, match=why):
            parse(text)


def test_adapters_need_no_gradients_of_the_weights() -> None:
    whole, adapters = (
        training("Qwen3-8B", TABLES["h100"], 16, ActorConfig(lora=lora)) for lora in (None, LoRAConfig(rank=16))
    )
    ours, theirs = adapters.passes(4, 16384, 1e8, train=True), whole.passes(4, 16384, 1e8, train=True)
    assert 0.6 < ours.products / theirs.products < 0.75
    assert adapters.optimizer().seconds < whole.optimizer().seconds / 20
    assert adapters.data_communication(16384, 1e8).seconds < whole.data_communication(16384, 1e8).seconds


def test_an_optimizer_on_the_cpu_waits_for_the_slower_of_the_link_and_the_hosts_memory() -> None:
    on_cpu = ActorConfig(optimizer=OptimizerConfig(device="cpu"))
    own = actor_parameters(model("Qwen3-8B")).total / 16
    for hardware, seconds in (
        (replace(TABLES["h100"], host_memory_share=1.0, host_memory=1e9), 36 * own / 1e9),
        (replace(TABLES["h100"], host_link_share=1.0, host_link=1e9), 6 * own / 1e9),
    ):
        there, here = training("Qwen3-8B", hardware, 16, on_cpu), training("Qwen3-8B", hardware, 16)
        assert there.optimizer().host == pytest.approx(seconds)
        assert there.optimizer().memory < here.optimizer().memory
        assert here.optimizer().host == 0
