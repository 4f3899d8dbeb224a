"""Weights of the actor as Hugging Face folders: the export at the end, the adapters alone, the reference policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_rl.actor.actor import Actor
from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.runtime import device
from megatron_rl.weights.export import export_hf, export_peft


def export(folder: Path, actor: Actor, model: Path, adapters: bool = False) -> str | None:
    """Writes a folder; every rank calls it. Returns the error, the same on every rank; None on success.

    Args:
        model: the Hugging Face folder that the actor started from, for tokenizer and the rest.
        adapters: these alone, as PEFT's; nothing where there are none.
    """
    try:
        with device.megatron():
            if not adapters:
                export_hf(folder, actor.chunks, actor.family, actor.hf_config, actor.parallel, model)
            elif actor.adapters is not None and (lora := actor.config.lora) is not None:
                export_peft(folder, actor.chunks, actor.adapters, lora, actor.hf_config, actor.parallel, model)
    except RuntimeError as failure:  # raised on every rank
        return str(failure)
    return None


class ReferenceFolder:
    """The reference policy of a run on disk, `<run_dir>/reference`: written with the first checkpoint, never changed.

    Attributes:
        digests: checksums of its files; None until it is known to be there.
    """

    def __init__(self, run_dir: Path, actor: Actor, model: Path) -> None:
        self.digests: dict[str, str] | None = None
        self._folder, self._actor, self._model = run_dir / "reference", actor, model

    @property
    def is_due(self) -> bool:
        """Whether there is a reference policy to write."""
        return self._actor.reference is not None and self.digests is None

    def save(self) -> str | None:
        """Writes it. Returns what went wrong, the same on every rank."""
        grid = self._actor.grid
        with self._actor.as_reference():
            error = export(self._folder, self._actor, self._model)
        if error is None:
            self.digests = grid.broadcast(manifest.digests(self._folder) if grid.is_main else None)
        return error

    def load(self, checkpoint: Path, digests: Mapping[str, str] | None) -> None:
        """Gives the actor the one that belongs to a checkpoint, from this run's folder or from where the checkpoint lies.

        Args:
            digests: as the checkpoint has them.

        Raises:
            CheckpointError: there is none, or one of its files is another.
        """
        grid, problems, written = self._actor.grid, list[str](), dict(digests or {})
        elsewhere = checkpoint.absolute().parents[1] / "reference"
        for folder in dict.fromkeys((self._folder, elsewhere)) if written else ():
            present = grid.broadcast(manifest.digests(folder) if grid.is_main else {})
            wrong = sorted(name for name, digest in written.items() if present.get(name) != digest)
            if not wrong:
                self._actor.load_hf(folder)
                self._actor.keep_reference()
                if folder == self._folder:  # otherwise the next save writes it here
                    self.digests = written
                return
            problems.append(f"{folder / wrong[0]} is not what was written" if present else f"{folder} is missing")
        raise CheckpointError(
            f"the recipe uses a reference policy (algorithm.kl), but {' and '.join(problems) or f'{checkpoint} has none'}; "
            "it is written with the first checkpoint of a run whose recipe uses one"
        )
