"""Log-probs and entropy from hidden states, against what torch makes of the whole logits in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.actor import head
from megatron_rl.actor.head import VocabShard, log_probs_from_hidden

from .processes import spawn

TOKENS, HIDDEN, VOCAB = 11, 8, 13  # the vocabulary divides by nothing: any sharding pads it
GENERATOR_SEED = 3


def problem(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, embedding of `rows` >= VOCAB rows (NaN-free garbage in the padding), targets, and two gradients."""
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    padding = 50 * torch.ones(rows - VOCAB, HIDDEN)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    up_log_probs, up_entropy = torch.randn(2, TOKENS, generator=generator)
    return hidden, torch.cat([weight, padding]), targets, up_log_probs, up_entropy


def reference(temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, and the gradients of hidden states and of the VOCAB rows, in float64."""
    hidden, weight, targets, up_log_probs, up_entropy = problem(VOCAB)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    total = (log_probs * up_log_probs).sum()
    if with_entropy:
        total = total + (entropy * up_entropy).sum()
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def close(own: Tensor, want: Tensor) -> None:
    """Within float32's rounding at the size of the tensor's largest element: logits of either sign cancel."""
    torch.testing.assert_close(own, want, rtol=1e-6, atol=2e-6 * float(want.abs().max()), check_dtype=False)


def check(group: Any, temperature: float, num_bytes: int, with_entropy: bool) -> None:
    """The function under test on this rank's shard of the vocabulary, against the reference."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    per_rank = 8 if size == 2 else 16
    hidden, weight, targets, up_log_probs, up_entropy = problem(per_rank * size)
    mine = weight[rank * per_rank : (rank + 1) * per_rank].clone().requires_grad_()
    hidden.requires_grad_()
    shard = VocabShard(start=rank * per_rank, vocab_size=VOCAB, group=group)
    log_probs, entropy = log_probs_from_hidden(hidden, mine, targets, shard, temperature, num_bytes, with_entropy)
    total = (log_probs * up_log_probs).sum()
    assert (entropy is not None) == with_entropy
    if entropy is not None:
        total = total + (entropy * up_entropy).sum()
    total.backward()
    assert hidden.grad is not None
    assert mine.grad is not None
    dist.all_reduce(hidden.grad, group=group)  # documented as the caller's: each rank has its share only
    want_log_probs, want_entropy, want_hidden, want_weight = reference(temperature, with_entropy)
    close(log_probs, want_log_probs)
    if entropy is not None:
        close(entropy, want_entropy)
    close(hidden.grad, want_hidden)
    real = mine.grad[: max(0, VOCAB - rank * per_rank)]
    close(real, want_weight[rank * per_rank : rank * per_rank + len(real)])
    assert not mine.grad[len(real) :].any(), "padding rows of the vocabulary got a gradient"


# Bytes of a tile: one logit, tiles that cut tokens and vocabulary, tiles that cut only the vocabulary, one tile.
CASES = list(itertools.product((1.0, 0.7, 2.5), (4, 4 * 30, 4 * 121, 10_000), (False, True)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of this process only."""
    if dist.is_initialized():
        yield dist.group.WORLD
        return
    rendezvous = f"file://{tmp_path_factory.mktemp('rendezvous') / 'file'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(("temperature", "num_bytes", "with_entropy"), CASES)
def test_values_and_gradients_in_one_process(
    alone: Any, temperature: float, num_bytes: int, with_entropy: bool
) -> None:
    check(alone, temperature, num_bytes, with_entropy)


def test_the_size_of_the_tiles_does_not_matter(alone: Any) -> None:
    hidden, weight, targets, _, _ = problem(16)
    shard = VocabShard(0, VOCAB, alone)
    one, two = (log_probs_from_hidden(hidden, weight, targets, shard, 0.7, num_bytes, True) for num_bytes in (16, 500))
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def test_no_tokens_give_no_values_and_a_zero_gradient(alone: Any) -> None:
    _, weight, _, _, _ = problem(16)
    weight.requires_grad_()
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    log_probs, _ = log_probs_from_hidden(hidden, weight, torch.zeros(0, dtype=torch.long), VocabShard(0, VOCAB, alone))
    log_probs.sum().backward()
    assert log_probs.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def _sharded() -> None:
    dist.init_process_group("gloo")
    for case in CASES:
        check(dist.group.WORLD, *case)
    dist.destroy_process_group()


@pytest.mark.ranks
def test_values_and_gradients_with_the_vocabulary_on_two_ranks(tmp_path: Path) -> None:
    spawn(_sharded, 2)


@pytest.mark.parametrize("is_embedding_too", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_added_to_megatrons_own(dtype: torch.dtype, is_embedding_too: bool) -> None:
    """Two micro-batches; of a weight that is the embedding too, autograd gets the embedding's gradient alone."""
    hidden, weight, targets, up_log_probs, _ = problem(16)
    weight = weight.to(dtype).requires_grad_()
    weight.main_grad, weight.zero_out_wgrad = torch.ones(16, HIDDEN), is_embedding_too  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    for _ in range(2):
        log_probs, _ = log_probs_from_hidden(hidden.to(dtype), weight, targets, VocabShard(0, VOCAB, None))
        (log_probs * up_log_probs).sum().backward()
    want = 1 + 2 * reference(1.0, False)[3]
    found = weight.main_grad[:VOCAB].double()  # type: ignore[attr-defined]
    torch.testing.assert_close(
        found, want, rtol=0, atol=(1e-5 if dtype == torch.float32 else 0.02) * float(want.abs().max())
    )
    assert (weight.main_grad[VOCAB:] == 1).all()  # type: ignore[attr-defined]
    assert weight.grad_added_to_main_grad != is_embedding_too  # type: ignore[attr-defined]
    assert (weight.grad is None) == is_embedding_too


@pytest.fixture
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A GPU's product in float32, which torch does not have for a CPU, in plain torch; and which products were asked for."""
    asked: list[str] = []

    def product(
        total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1, out: Tensor
    ) -> Tensor:
        assert (total.dtype, left.dtype, right.dtype, out.dtype) == (dtype, torch.bfloat16, torch.bfloat16, dtype)
        asked.append("first" if beta == 0 else "further")
        total = torch.zeros_like(total) if beta == 0 else total  # as cuBLAS: what is there is not read
        return out.copy_(beta * total + alpha * (left.float() @ right.float()))

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", product, "CPU")
    monkeypatch.setattr(head, "_adds_in_float32", lambda device: True)
    yield asked
    library._destroy()


@pytest.mark.parametrize("in_place", [True, False])
def test_products_of_a_gpu_are_summed_in_float32(products_in_float32: list[str], in_place: bool) -> None:
    """Many tiles: sums of rounded products would be further from float64 than one rounding of the result."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(96, 16, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(96, (64,), generator=generator)
    if in_place:
        weight.main_grad = torch.zeros(96, 16)  # type: ignore[attr-defined]
    log_probs, _ = log_probs_from_hidden(hidden, weight, targets, VocabShard(0, 96, None), num_bytes=4 * 64)
    log_probs.sum().backward()
    assert "further" in products_in_float32
    assert ("first" in products_in_float32) != in_place
    # The factors of each product are rounded to bf16, so float32 sums of the very same factors are the measure.
    exact = [leaf.detach().double() for leaf in (hidden, weight)]
    tile = -(exact[0] @ exact[1].t()).bfloat16().double().softmax(-1)
    tile[torch.arange(64), targets] += 1
    tile = tile.bfloat16().double()
    own = weight.main_grad if in_place else weight.grad  # type: ignore[attr-defined]
    for found, right in ((hidden.grad, tile @ exact[1]), (own, tile.t() @ exact[0])):
        assert found is not None
        error = float((found.double() - right).norm() / right.norm())
        assert error < (3e-5 if found.dtype == torch.float32 else 2e-3), error


def test_the_product_of_a_gpu_is_one_that_torch_has() -> None:
    """torch checks shapes and dtypes without a device."""
    total = torch.empty(6, 4, device="meta")
    left, right = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((6, 3), (3, 4)))
    for first in (True, False):
        head._accumulate(total, left, right, first)
