"""The resharding plan, carried out over arrays of numbers: every engine rank ends with what vLLM would have cut for it.

What is expected is cut by hand (`cut_by_hand`).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.actor import ParallelConfig
from megatron_rl.models import Model
from megatron_rl.weights.layouts import ActorLayout, EngineLayout, Piece, numbered
from megatron_rl.weights.overlaps import Flow, Overlap, Pairs
from megatron_rl.weights.sync_plan import Move, Plan, RankPlan, make_plan

from .cut_by_hand import CONFIGS, Weights, model_of
from .mixed import BIASED, LAYERS


class World:
    """All ranks of a run in one process."""

    def __init__(
        self, model: Model, parallel: ParallelConfig, world: int, engine: EngineLayout, limit: int, node: int
    ) -> None:
        self.model, self.parallel, self.engine = model, parallel, engine
        self.actor = ActorLayout.of(parallel, model.dims["layers"], world)
        self.plan: Plan = make_plan(model, self.actor, engine, bucket_elements=limit, node=node)
        self.engines = engine.ranks(self.actor)
        self.ranks: list[RankPlan] = [self.plan.of(rank) for rank in range(self.engines.stop)]
        self.weights = Weights(model)

    def packed(self, held: dict[tuple[int, int, int], np.ndarray], moves: list[Move]) -> list[np.ndarray]:
        """A message's boxes, as the sender cuts them from its parameters."""
        found = []
        for move in moves:
            rule, box = self.model.family.rules[move.box.rule], move.box
            span = range(move.source_at, move.source_at + box.stop - box.start)
            local = range(move.source_expert, move.source_expert + box.last - box.first)
            cuts = [held[move.source_rule, box.layer, expert].take(span, rule.dim) for expert in local]
            value = np.stack(cuts) if rule.per_expert else cuts[0]
            assert value.shape == box.shape(self.model, 4)
            found.append(value)
        return found

    def written(self, parameters: dict[str, np.ndarray], moves: list[Move], boxes: list[np.ndarray]) -> None:
        for move, value in zip(moves, boxes, strict=True):
            rule, box = self.model.family.rules[move.box.rule], move.box
            target, step = parameters[rule.engine[box.tensor].format(layer=box.layer)], rule.engine_step
            spot: list[slice] = [slice(None)] * len(rule.hf[0].shape)
            spot[rule.dim] = slice(move.target_at, move.target_at + (box.stop - box.start - 1) * step + 1, step)
            if rule.per_expert:
                spot.insert(0, slice(move.target_expert, move.target_expert + box.last - box.first))
            assert (target[tuple(spot)] == -1).all(), "written twice"
            target[tuple(spot)] = value

    def check(self, limit: int) -> None:
        """Carries the plan out and compares every rank's parameters."""
        held = [
            self.weights.of_actor(self.actor, self.parallel, rank.rank) if rank.rank < self.actor.world else {}
            for rank in self.ranks
        ]
        engines = [{name: np.full(shape, -1) for name, shape in rank.parameters.items()} for rank in self.ranks]
        whole: list[list[str]] = [[] for _ in self.ranks]
        total = [0] * len(self.ranks)
        wanted = [
            self.weights.of_engine(
                self.engine.tensor, (rank.rank - self.engines.start) % self.engine.tensor, self.engine.expert
            )
            if rank.rank in self.engines
            else {}
            for rank in self.ranks
        ]
        for number in range(len(self.plan.buckets)):
            sent = {
                (rank.rank, target): self.packed(held[rank.rank], moves)
                for rank in self.ranks
                for target, moves in rank.buckets[number].sends.items()
            }
            for rank in self.ranks:
                bucket = rank.buckets[number]
                assert list(bucket.sends) == sorted(bucket.sends)
                assert list(bucket.receives) == sorted(bucket.receives)
                self.written(engines[rank.rank], bucket.copies, self.packed(held[rank.rank], bucket.copies))
                received = 0
                for source, moves in bucket.receives.items():
                    boxes = sent.pop((source, rank.rank))
                    self.written(engines[rank.rank], moves, boxes)
                    received += sum(box.size for box in boxes)
                total[rank.rank] += received
                assert received <= limit or limit < 1000  # about what one position of some weights takes
                for name in bucket.finished:
                    np.testing.assert_array_equal(engines[rank.rank][name], wanted[rank.rank][name], name)
                whole[rank.rank] += bucket.finished
            assert not sent, "sent and not received"
        for rank in self.ranks:
            mine, slices = (
                np.concatenate([np.zeros(0, int), *(value.ravel() for value in which[rank.rank].values())])
                for which in (held, wanted)
            )
            missing = np.setdiff1d(slices[slices >= 0], mine).size
            assert total[rank.rank] == missing, "more than its slice less what it holds"
            assert sorted(whole[rank.rank]) == sorted(wanted[rank.rank]) == sorted(rank.parameters)


def check(
    architecture: str,
    parallel: ParallelConfig,
    world: int,
    engine: EngineLayout,
    limit: int = 10**6,
    node: int = 8,
    **changes: Any,
) -> World:
    found = World(model_of(architecture, **changes), parallel, world, engine, limit, node)
    found.check(limit)
    return found


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_family(architecture: str, tied: bool) -> None:
    check(architecture, ParallelConfig(tensor=2, pipeline=2), 8, EngineLayout(4), 300, 4, tie_word_embeddings=tied)


DENSE, EXPERTS = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
DELTA_EXPERTS, BIASED_EXPERTS = "Qwen3_5MoeForCausalLM", "GptOssForCausalLM"
MOES = (EXPERTS, DELTA_EXPERTS, BIASED_EXPERTS)


@pytest.mark.parametrize(
    ("architecture", "parallel", "world", "engine"),
    [
        (DENSE, ParallelConfig(tensor=2), 2, EngineLayout(2)),
        (DENSE, ParallelConfig(tensor=2, pipeline=2), 4, EngineLayout(4)),
        (DENSE, ParallelConfig(tensor=4), 4, EngineLayout(2)),
        (EXPERTS, ParallelConfig(expert=4), 4, EngineLayout(4)),
        (EXPERTS, ParallelConfig(expert=4), 4, EngineLayout(2, expert=True)),
        (DENSE, ParallelConfig(pipeline=4), 4, EngineLayout(1)),
        (DENSE, ParallelConfig(), 4, EngineLayout(1)),
        (DENSE, ParallelConfig(pipeline=2, virtual_pipeline=2, context=2), 8, EngineLayout(2)),  # of 6 layers
        (DENSE, ParallelConfig(tensor=4), 8, EngineLayout(8)),  # more ranks than key/value heads
        (EXPERTS, ParallelConfig(tensor=2, expert=2, expert_tensor=2), 8, EngineLayout(4)),
        (EXPERTS, ParallelConfig(expert=2, expert_tensor=2), 4, EngineLayout(4, expert=True)),
        (EXPERTS, ParallelConfig(tensor=2, pipeline=3, expert_tensor=4), 12, EngineLayout(1)),  # single experts cut
        (DELTA_EXPERTS, ParallelConfig(tensor=4, expert=2), 4, EngineLayout(2, expert=True)),
        (BIASED_EXPERTS, ParallelConfig(tensor=2, pipeline=2, expert=2), 4, EngineLayout(2)),
        (BIASED_EXPERTS, ParallelConfig(expert=4), 4, EngineLayout(4, expert=True)),
        (DENSE, ParallelConfig(tensor=2, pipeline=2), 4, EngineLayout(2, generators=4)),  # on ranks of their own
        (DENSE, ParallelConfig(), 2, EngineLayout(1, generators=5)),
        (EXPERTS, ParallelConfig(expert=2, expert_tensor=2), 4, EngineLayout(2, expert=True, generators=2)),
        (DELTA_EXPERTS, ParallelConfig(tensor=2, pipeline=2, expert=2), 4, EngineLayout(4, generators=4)),
    ],
)
def test_layouts(architecture: str, parallel: ParallelConfig, world: int, engine: EngineLayout) -> None:
    layers = 6 if parallel.virtual_pipeline > 1 else 5
    for limit in (1000, 10**6):
        check(architecture, parallel, world, engine, limit, num_hidden_layers=layers)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, int, ParallelConfig, int, EngineLayout]:
    architecture = draw(st.sampled_from(sorted(CONFIGS)))
    layers, pipeline, virtual = draw(
        st.sampled_from([(5, 1, 1), (5, 2, 1), (5, 3, 1), (8, 2, 2), (10, 4, 2), (4, 4, 1)])
    )
    tensor, context, data = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 1, 2), (1, 2, 3)))
    stage = tensor * context * data
    parts = (1,) if architecture == "GptOssForCausalLM" else (1, 2, 4)  # whose experts are whole
    fitting = (
        [(e, t) for e in (1, 2, 4, 8) for t in parts if stage % (e * t) == 0] if architecture in MOES else [(1, 1)]
    )
    expert, expert_tensor = draw(st.sampled_from(fitting))
    world = stage * pipeline
    tp = draw(st.sampled_from([size for size in (1, 2, 4, 8) if world % size == 0]))
    parallel = ParallelConfig(tensor, pipeline, virtual, context, expert, expert_tensor)
    return (
        architecture,
        layers,
        parallel,
        world,
        EngineLayout(tp, architecture in MOES and tp > 1 and draw(st.booleans())),
    )


@settings(max_examples=12, deadline=None)
@given(layouts(), st.sampled_from([100, 1000, 3000]), st.sampled_from([1, 3, 4, 8]), st.booleans())
def test_any_layout(
    layout: tuple[str, int, ParallelConfig, int, EngineLayout], limit: int, node: int, tied: bool
) -> None:
    architecture, layers, parallel, world, engine = layout
    check(architecture, parallel, world, engine, limit, node, num_hidden_layers=layers, tie_word_embeddings=tied)


@pytest.mark.parametrize("parallel", [ParallelConfig(pipeline=2, expert=2), ParallelConfig(tensor=2, expert_tensor=2)])
def test_layers_that_differ_and_buffers(parallel: ParallelConfig) -> None:
    """Dense layers on the first stage, experts and their buffer on the other; then all of them on one."""
    model = Model(BIASED, BIASED.describe({**CONFIGS[EXPERTS], "num_hidden_layers": LAYERS}))
    for limit in (1000, 10**6):
        World(model, parallel, 4, EngineLayout(2), limit, 8).check(limit)


def test_a_rank_keeps_what_it_has_and_asks_its_own_node_first() -> None:
    found = check(DENSE, ParallelConfig(tensor=2), 8, EngineLayout(1), node=4)
    for rank in found.ranks:
        peers = {peer for bucket in rank.buckets for peer in (*bucket.sends, *bucket.receives)}
        assert peers
        assert {peer // 4 for peer in peers} == {rank.rank // 4}
    same = check(DENSE, ParallelConfig(tensor=2), 4, EngineLayout(2), vocab_size=128)
    assert not any(bucket.sends or bucket.receives for rank in same.ranks for bucket in rank.buckets)


def test_a_holder_of_the_same_node_is_asked_however_much_it_sends_already() -> None:
    model, engine = model_of(DENSE), EngineLayout(1)
    actor = ActorLayout.of(ParallelConfig(tensor=2), 5, 8)
    rule = next(rule for _, rule in numbered(model) if rule.per_layer and rule.is_projection)
    flow = Flow.of(Pairs.of(model, rule, actor, engine), rule, actor.stages(model, rule, 0), actor, engine, node=4)
    for busy in (0, 1):  # one of the two nodes sends much more than the other
        sources = flow.sources(np.repeat([1e6 * (busy == 0), 1e6 * (busy == 1)], 4))
        assert (sources // 4 == flow.target // 4).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3000), st.integers(1, 9))
def test_cuts_of_many_positions_keep_blocks_of_scales_whole(start: int, length: int, parts: int) -> None:
    """Blocks are counted from the tensor's first position, wherever the part that is cut begins."""
    overlap = Overlap(Piece(0, start, start + length, 0, 1, at=5, expert=0), at=7, expert=0)
    found = [cut for part in range(parts) if (cut := overlap.cut(part, parts))]
    assert (found[0].target.start, found[-1].target.stop) == (start, start + length)
    for before, after in itertools.pairwise(found):
        assert before.target.stop == after.target.start
        assert after.target.start % 128 == 0 or length < parts * 128
    for cut in found:
        assert cut.target.at - 5 == cut.at - 7 == cut.target.start - start


def test_replicas_share_the_work_of_sending() -> None:
    found = check(DENSE, ParallelConfig(pipeline=2), 16, EngineLayout(4), 500, node=2)
    sent = np.sum([traffic.sent for traffic in found.plan.traffic()], axis=0)
    for stage in (sent[:8], sent[8:]):
        assert stage.max() <= 1.2 * stage.mean()  # in parts as large as these
    # Of the two ranks that hold a quarter, one has more to do for its own node; the other serves more of the rest.
    found = check(DENSE, ParallelConfig(tensor=4), 8, EngineLayout(1), 500, node=3)
    sent = np.sum([traffic.sent for traffic in found.plan.traffic()], axis=0)
    assert sent[3] == pytest.approx(sent[7], rel=0.1)


def test_layouts_that_do_not_fit_are_refused() -> None:
    model = model_of(EXPERTS)
    with pytest.raises(ValueError, match=r"6 ranks are no multiple of actor.parallel.tensor x pipeline x context"):
        ActorLayout.of(ParallelConfig(tensor=4), 5, 6)
    with pytest.raises(ValueError, match=r"a stage's 4 ranks are no multiple of actor.parallel.expert x expert_tensor"):
        ActorLayout.of(ParallelConfig(expert=8), 5, 4)
    actor = ActorLayout.of(ParallelConfig(), 5, 3)
    with pytest.raises(ValueError, match=r"3 ranks are no multiple of rollout.tensor_parallel = 2"):
        make_plan(model, actor, EngineLayout(2), bucket_elements=100, node=8)
    rules = tuple(replace(rule, engine=()) if rule.per_expert else rule for rule in model.family.rules)
    unknown = replace(model, family=replace(model.family, rules=rules))
    with pytest.raises(ValueError, match=r"does not say where vLLM keeps .*experts.{expert}.gate_proj"):
        make_plan(unknown, actor, EngineLayout(1), bucket_elements=100, node=8)


@pytest.mark.parametrize(
    ("layers", "parallel"),
    [
        (94, ParallelConfig(pipeline=8)),
        (5, ParallelConfig(pipeline=2)),
        (94, ParallelConfig(pipeline=4, virtual_pipeline=2)),
        (94, ParallelConfig(pipeline=8, virtual_pipeline=4)),
        (6, ParallelConfig(pipeline=2, virtual_pipeline=2)),
        (10, ParallelConfig(pipeline=4, virtual_pipeline=2)),
        (36, ParallelConfig(pipeline=3, virtual_pipeline=4)),
    ],
)
def test_layers_and_ranks_are_where_megatron_core_puts_them(layers: int, parallel: ParallelConfig) -> None:
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megatron_rl.actor.build import uneven_stages

    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        **uneven_stages(layers, parallel),
    )
    grid = replace(parallel, tensor=2, context=2, expert=4, expert_tensor=2)
    world = 16 * stages
    layout = ActorLayout.of(grid, layers, world)
    for stage, held in enumerate(layout.layers):
        built: list[int] = []
        for chunk in range(chunks) if chunks > 1 else [None]:
            first = get_transformer_layer_offset(config, chunk, stage)
            built += range(first, first + get_num_layers_to_build(config, chunk, stage))
        assert list(held) == built
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=2, ep=1, dp=4, pp=stages, cp=2, order=order)
    experts = RankGenerator(tp=2, ep=4, dp=2, pp=stages, cp=1, order=order)
    assert all([rank // layout.stage_ranks for rank in group] == list(range(stages)) for group in dense.get_ranks("pp"))
    assert all([rank % 2 for rank in group] == [0, 1] for group in (*dense.get_ranks("tp"), *experts.get_ranks("tp")))
    assert all([rank // 2 % 4 for rank in group] == [0, 1, 2, 3] for group in experts.get_ranks("ep"))
