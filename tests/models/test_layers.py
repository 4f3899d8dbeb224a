"""Our own modules in Megatron's layer, and the adapter that lets Megatron run without a GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.modules.layers import PackedAttention
from megatron_rl.seams import megatron_cpu
from megatron_rl.seams.megatron_cpu import _TORCH_CUDA, _TYPED_CONSTRUCTORS, MegatronOnCpu


def offsets_of(lengths: list[int]) -> SimpleNamespace:
    cumulative = torch.tensor([0, *lengths]).cumsum(0).int()
    return SimpleNamespace(cu_seqlens_q=cumulative, max_seqlen_q=max(lengths))


PLAIN = {
    "context_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "params_dtype": torch.float32,
}


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Attention of one sequence in float64, written out: [t, heads, d]."""
    share = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(share, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * (scale or query.shape[-1] ** -0.5)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


def sinking(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The same with a window and with sinks, head by head and token by token: a sink is one more term of the denominator."""
    share, rows = query.shape[1] // key.shape[1], []
    for token in range(len(query)):
        first = 0 if window is None else max(0, token + 1 - window)
        heads = []
        for head in range(query.shape[1]):
            keys, values = (x[first : token + 1, head // share].double() for x in (key, value))
            terms = (keys @ query[token, head].double() * query.shape[-1] ** -0.5).exp()
            beside = 0.0 if sinks is None else sinks[head].double().exp()
            heads.append(terms @ values / (terms.sum() + beside))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [7, 1, 3], [2, 9], [70, 3, 33, 40, 65, 8], [64, 200, 1, 257, 131]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_packed_sequences_attend_as_if_each_were_alone(lengths, heads, kv_heads, scale) -> None:
    generator = torch.Generator().manual_seed(0)
    total, size = sum(lengths), 8

    def tensor(count: int) -> torch.Tensor:
        return torch.randn(total, count, size, generator=generator).requires_grad_()

    query, key, value = tensor(heads), tensor(kv_heads), tensor(kv_heads)
    upstream = torch.randn(total, heads, size, generator=generator)
    attention = PackedAttention(SimpleNamespace(**PLAIN), softmax_scale=scale)
    out = attention(query, key, value, None, packed_seq_params=offsets_of(lengths))
    own = torch.autograd.grad((out * upstream).sum(), (query, key, value))
    parts = [torch.split(x, lengths) for x in (query, key, value)]
    alone = torch.cat([causal(q, k, v, scale) for q, k, v in zip(*parts, strict=True)])
    want = torch.autograd.grad((alone * upstream).sum(), (query, key, value))
    close = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(out, alone, **close)
    torch.testing.assert_close(own, want, **close)


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_windows_and_sinks_are_those_of_a_loop_in_float64(window: int | None, with_sinks: bool) -> None:
    """Every second layer has a window, all layers have sinks."""
    generator = torch.Generator().manual_seed(0)
    lengths, heads, kv_heads, size = [7, 1, 40, 43], 4, 2, 8
    draw = partial(torch.randn, generator=generator)
    query, key, value = (draw(sum(lengths), count, size).requires_grad_() for count in (heads, kv_heads, kv_heads))
    upstream = draw(sum(lengths), heads, size)
    options = {**PLAIN, "num_attention_heads": heads, "softmax_type": "learnable" if with_sinks else "vanilla"}
    if window is not None:
        options |= {"window_size": (window - 1, 0), "window_attn_skip_freq": [1, 0]}
    for layer_number, own_window in ((1, window), (2, None)):
        attention = PackedAttention(SimpleNamespace(**options), layer_number)
        sinks = attention.softmax_offset
        leaves = [query, key, value]
        if sinks is not None:
            sinks.data.copy_(2 * draw(heads))
            leaves.append(sinks)
        out = attention(query, key, value, None, packed_seq_params=offsets_of(lengths))
        parts = [torch.split(x, lengths) for x in (query, key, value)]
        alone = torch.cat([sinking(q, k, v, own_window, sinks) for q, k, v in zip(*parts, strict=True)])
        close = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
        torch.testing.assert_close(out, alone, **close)
        own, want = (torch.autograd.grad((x * upstream).sum(), leaves) for x in (out, alone))
        torch.testing.assert_close(own, want, **close)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the adapter is for machines without a GPU")
def test_the_adapter_answers_for_cuda_and_leaves_no_trace() -> None:
    names = [*_TORCH_CUDA, *_TYPED_CONSTRUCTORS]
    before = {name: getattr(torch.cuda, name) for name in names}

    def unchanged() -> bool:
        return all(getattr(torch.cuda, name) is before[name] for name in names)

    with MegatronOnCpu():
        assert not unchanged()
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.ones(2).cuda().tolist() == [1, 1]
        assert torch.cuda.IntTensor([3]).dtype == torch.int32
        with MegatronOnCpu():  # Megatron's callbacks enter it again
            assert not unchanged()
        assert not unchanged(), "the inner exit has undone the outer one's work"
    assert unchanged()
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the adapter is for machines without a GPU")
def test_within_the_adapter_a_device_s_context_still_decides() -> None:
    megatron_cpu._replacements.cache_clear()
    torch.utils._device._device_constructors.cache_clear()  # as in a new process
    with MegatronOnCpu(), torch.device("meta"):
        assert torch.empty(2).is_meta
        assert torch.tensor([1.0]).is_meta
        assert not torch.zeros(2, device="cuda").is_meta


@pytest.mark.skipif(torch.cuda.is_available(), reason="the adapter is for machines without a GPU")
def test_the_adapter_is_undone_by_an_error_too() -> None:
    before = torch.cuda.current_device
    with pytest.raises(KeyError), MegatronOnCpu():
        raise KeyError
    assert torch.cuda.current_device is before
