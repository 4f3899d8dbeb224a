"""One conversion from its options: do it, say what was done, prove it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron_rl.base.messages import errors_named
from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.convert import jobs, programs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.merged import write_peft
from megatron_rl.checkpoint.convert.source import SourceModel, config_folder, megatron_folder
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.runtime.disk import size_text

Say = Callable[[str], None]


class Mismatch(RuntimeError):
    """`--verify` found a difference."""


def convert(options: argparse.Namespace, say: Say) -> None:
    """Runs `megatron-rl convert` with the options of `megatron_rl.commands.convert`.

    Raises:
        ValueError: the source, the target or the layout is not fit; see the modules of this package.
        OSError: it could not be written; the same call continues.
        Mismatch: the result is not the source.
    """
    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: must be at least 1")
    task: ToMegatron | ToHF
    if options.direction == "to-megatron":
        layout = Layout(options.tensor, options.pipeline, options.expert, options.expert_tensor)
        task = ToMegatron(options.hf, layout, options.dtype, options.shard_size, options.program)
        target = options.megatron
    else:
        source = megatron_folder(options.megatron)
        if options.adapter:
            for name in ("config", "master_weights", "any_padding", "verify"):
                if getattr(options, name):
                    raise ValueError(f"--{name.replace('_', '-')} has no effect with --adapter; leave it out")
            say(f"{options.hf}: {write_peft(source, options.hf)} tensors of adapters, as PEFT's")
            return
        config = config_folder(source, options.config)
        master, padding = options.master_weights, options.any_padding
        task, target = ToHF(source, config, options.dtype, options.shard_size, padding, master), options.hf
    if target.is_symlink() or not target.name:  # a folder is made beside it, and takes its place
        target = target.resolve()
    jobs.run(task, target, options.workers, say)
    files = manifest.read(target / task.inside)["files"]
    say(
        f"{target}: {len(task.names())} tensors, {size_text(sum(f['bytes'] for f in files.values()))} in {len(files)} files"
    )
    if isinstance(task, ToMegatron):
        hint = programs.how_to_load(task.program, target, SourceModel.read(task.hf))
        if hint is not None:
            say(hint)
    if options.verify:
        verify(task, target, options.workers, say)


def verify(task: ToMegatron | ToHF, target: Path, workers: int, say: Say) -> None:
    """Raises Mismatch where the result is not what the source says."""
    from megatron_rl.checkpoint.convert.verify import Logits, compare, compare_logits

    with errors_named("", as_error=Mismatch):
        compared = compare(task, target, workers)
        total = size_text(sum(c.nbytes for c in compared))
        say(f"verified: the checksums of all {len(compared)} tensors ({total}) equal the source's")
        if isinstance(task, ToMegatron):
            folder = target / task.inside
            logits = compare_logits(task.hf, folder, folder, task.dtype)
        else:
            logits = compare_logits(target, task.megatron, task.config, task.dtype, task.master)
    if isinstance(logits, Logits):
        say(
            f"verified: logits of transformers and Megatron-Core differ by at most {logits.difference:.2e}, "
            f"{logits.relative:.1e} of the largest (limit {logits.tolerance:g})"
        )
    else:
        say(logits)
