"""Megatron-Core on a machine without a GPU. Written for 0.19.2.

Megatron-Core names CUDA in a few dozen places that carry no CUDA meaning: buffers made with ``device="cuda"``,
streams and events around collectives, and dtype checks that compare ``tensor.type()`` with ``"torch.cuda.FloatTensor"``.
``MegatronOnCpu`` answers those for as long as it is entered and undoes everything on exit, so nothing else in the process
(vLLM, the tests, the user's code) sees a changed torch. It is never used where a GPU is present.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils

_CUDA_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
# Functions, and methods of a tensor, that create tensors on the device that they are called with.
_CREATING = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "scalar_tensor", "tensor"),
    *("zeros", "zeros_like"),
)
_CREATING_BY_TENSORS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to")
_TYPED_CONSTRUCTORS = {
    "FloatTensor": torch.float32,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BFloat16Tensor": torch.bfloat16,
}


class _NoStream:
    """Stands in for a CUDA stream or event: on a CPU everything is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def _nothing(self, *args: object, **kwargs: object) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _nothing

    def record_event(self, event: _NoStream | None = None) -> _NoStream:
        return event or self

    def query(self) -> bool:
        return True


_TORCH_CUDA: dict[str, Callable[..., object]] = {
    "current_device": lambda: MegatronOnCpu.current_device,
    "synchronize": _NoStream()._nothing,
    "empty_cache": _NoStream()._nothing,
    "Stream": _NoStream,
    "Event": _NoStream,
    "stream": _NoStream,
    "current_stream": _NoStream,
    "default_stream": _NoStream,
}


_all_to_all_single = torch.distributed.all_to_all_single
_all_gather = torch.distributed.all_gather
_reduce_scatter = torch.distributed.reduce_scatter
_rotate_one_by_one: Callable[..., torch.Tensor] = rope_utils._apply_rotary_pos_emb_thd


def _all_to_all_with_lists(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | torch.Tensor | None = None,
    input_split_sizes: Sequence[int] | torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Megatron's expert dispatcher passes split sizes as tensors or arrays, which only NCCL's binding takes."""

    def sizes(splits: Sequence[int] | torch.Tensor | None) -> list[int] | None:
        return None if splits is None else [int(size) for size in splits]

    return _all_to_all_single(output, input, sizes(output_split_sizes), sizes(input_split_sizes), group, async_op)


def _all_gather_unequal(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Pads what ranks gather: with tensor and expert parallelism at once different numbers of tokens, which gloo refuses."""
    longest = max(shard.shape[0] for shard in tensor_list)
    if all(shard.shape[0] == longest for shard in tensor_list):
        _all_gather(tensor_list, tensor.contiguous(), group)
        return
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    gathered = [torch.empty_like(padded) for _ in tensor_list]
    _all_gather(gathered, padded, group)
    for shard, whole in zip(tensor_list, gathered, strict=True):
        shard.copy_(whole[: shard.shape[0]])


def _reduce_scatter_unequal(
    output: torch.Tensor, input_list: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """The backward pass of `_all_gather_unequal`: sums all parts, of which each rank keeps its own."""
    longest = max(shard.shape[0] for shard in input_list)
    if all(shard.shape[0] == longest for shard in input_list):
        _reduce_scatter(output, [shard.contiguous() for shard in input_list], group=group)
        return
    total = torch.cat(input_list)
    torch.distributed.all_reduce(total, group=group)
    output.copy_(total.split([shard.shape[0] for shard in input_list])[torch.distributed.get_rank(group)])


def _rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
    multi_latent_attention: bool | None = None,
) -> torch.Tensor:
    """Rotates all packed sequences at once, [tokens, heads, width]: since 0.17 Megatron-Core rotates one after the other,
    which makes forward and backward passes of short sequences twice as long on a CPU."""
    assert cp_group is not None, "Megatron-Core names the group wherever sequences are packed"
    settings = (rotary_interleaved, mla_rotary_interleaved, mscale)
    if cp_group.size() > 1 or freqs.shape[0] == t.shape[0]:  # cut sequences, or an angle for each token
        return _rotate_one_by_one(t, cu_seqlens, freqs, *settings, cp_group, multi_latent_attention)
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=t.shape[0])
    positions = torch.arange(t.shape[0], device=t.device) - starts
    return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], *settings).squeeze(1)


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if (isinstance(device, str) and device.startswith("cuda")) or getattr(device, "type", "") == "cuda":
            kwargs["device"] = "cpu"
        return create(*args, **kwargs)

    return created


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs and (name := _CUDA_TYPES.get(tensor.dtype)):
        return name
    return torch._C.TensorBase.type(tensor, *args, **kwargs)


@functools.cache
def _replacements() -> dict[tuple[object, str], Any]:
    with torch.device("cpu"):
        torch.empty(0)  # torch's device contexts look up once which functions take a device: they must not find ours
    cuda = _TORCH_CUDA | {
        name: functools.partial(torch.tensor, dtype=dtype) for name, dtype in _TYPED_CONSTRUCTORS.items()
    }
    return {
        **{(torch.cuda, name): value for name, value in cuda.items()},
        **{(torch, name): _on_cpu(getattr(torch, name)) for name in _CREATING},
        **{(torch.Tensor, name): _on_cpu(getattr(torch.Tensor, name)) for name in _CREATING_BY_TENSORS},
        (torch.Tensor, "type"): _type,
        (torch.Tensor, "cuda"): lambda tensor, *_, **__: tensor,
        (torch.distributed, "all_to_all_single"): _all_to_all_with_lists,
        (torch.distributed, "all_gather"): _all_gather_unequal,
        (torch.distributed, "reduce_scatter"): _reduce_scatter_unequal,
        (rope_utils, "_apply_rotary_pos_emb_thd"): _rotate_packed,
        # The router's product, where Transformer Engine is installed; without it, torch's.
        (moe_utils, "te_general_gemm"): None,
        # Activation recomputation restores both before it computes a layer again, besides the CPU's own state.
        (random, "_get_cuda_rng_state"): lambda **_: torch.empty(0),
        (random, "_set_cuda_rng_state"): _NoStream()._nothing,
    }


class NoDropoutRngTracker(random.CudaRNGStatesTracker):
    """Megatron's per-rank CUDA random state, which only dropout reads; our models have none, so forking is a no-op."""

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


_INHERITED = object()  # the class has no attribute of that name itself: its base has


class MegatronOnCpu(contextlib.AbstractContextManager["MegatronOnCpu"]):
    """Enter around calls into Megatron-Core. What is replaced is looked up by name where it is used; a `TorchFunctionMode`
    would see every call, and make passes through small models a quarter slower."""

    current_device: torch.device = torch.device("cpu")  # meta inside `runtime.device.without_content`
    _depth = 0
    _saved: dict[tuple[Any, str], object]

    def __enter__(self) -> MegatronOnCpu:
        if MegatronOnCpu._depth == 0:
            replacements = _replacements()
            MegatronOnCpu._saved = {(owner, name): vars(owner).get(name, _INHERITED) for owner, name in replacements}
            for (owner, name), value in replacements.items():
                setattr(owner, name, value)
        MegatronOnCpu._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        MegatronOnCpu._depth -= 1
        if MegatronOnCpu._depth == 0:
            for (owner, name), value in MegatronOnCpu._saved.items():
                if value is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


def install_rng_tracker() -> None:
    """Gives Megatron-Core the tracker above; call once, before a model is built."""
    random._CUDA_RNG_STATE_TRACKER = NoDropoutRngTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
