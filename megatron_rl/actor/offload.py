"""Device memory given up for a while: its contents wait in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage

from megatron_rl.config.actor import ActorConfig
from megatron_rl.runtime import device
from megatron_rl.runtime.host_memory import HostMemory
from megatron_rl.seams.megatron import Chunk
from megatron_rl.seams.transformer_engine import parts


class Offload:
    """Empties tensors' memory into host memory, and fills it again. The tensors, and views of them, stay the same objects.

    Copies run on a stream of their own: `back` does not wait for them, `wait` makes the current stream do so. On a CPU the
    same happens in order.
    """

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._away: list[tuple[UntypedStorage, Tensor]] = []  # with the host memory that holds it
        self._stream = torch.cuda.Stream() if device.has_gpu() else None

    def out(self, tensors: Iterable[Tensor]) -> None:
        """Moves all memory that the tensors lie in to the host; of those on this process's device, and once each."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device == device.device()}
        storages.pop(0, None)  # empty, or away already
        hosts = self._memory.take([storage.nbytes() for storage in storages.values()])
        with self._copying():
            for storage, host in zip(storages.values(), hosts, strict=True):
                host.copy_(_bytes(storage), non_blocking=True)
                self._away.append((storage, host))
        device.synchronize()
        for storage, _ in self._away:
            storage.resize_(0)

    def back(self) -> None:
        """Starts to fill what `out` emptied. Whoever reads it calls `wait` before."""
        for storage, host in self._away:
            storage.resize_(host.nbytes)
        with self._copying():
            for storage, host in self._away:
                _bytes(storage).copy_(host, non_blocking=True)
        self._away = []
        self._memory.free()  # the next `out` writes it on the same stream, so after these copies

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _copying(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


class ActorMemory:
    """The device memory that an actor gives up while the engine generates, as its recipe says."""

    def __init__(self, config: ActorConfig, ddp_chunks: Sequence[Chunk]) -> None:
        self._config, self._chunks = config, ddp_chunks
        self._state, self._weights = Offload(), Offload()

    def state_out(self, state: Iterable[Tensor]) -> None:
        """Frees gradients, and moves the optimizer's state to the host."""
        if self._config.offload:
            with device.megatron():
                for chunk in self._chunks:
                    chunk.offload_grad_buffers()
            self._state.out(state)
            device.empty_cache()

    def weights_out(self, parameters: Iterable[Tensor]) -> None:
        if self._config.offload_weights:
            self._weights.out(part for parameter in parameters for part in parts(parameter) if part is not None)
            device.empty_cache()

    def weights_back(self) -> None:
        self._weights.back()
        self._weights.wait()

    def back(self) -> None:
        """Weights first; the optimizer's state follows while they are in use, see `wait`."""
        self.weights_back()
        if self._config.offload:
            self._state.back()
            with device.megatron():
                for chunk in self._chunks:
                    chunk.restore_grad_buffers()

    def wait(self) -> None:
        """Waits until the optimizer's state may be read."""
        self._state.wait()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
