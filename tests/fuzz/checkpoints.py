"""Damaged checkpoints through conversion, inspection and the check before a resume: refused by name, or right; never run.

A case changes bytes of some files of a small converted checkpoint. In half of the cases the manifest is written anew, as a
stranger would, so that it is the readers and not the checksums that have to notice.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.contents import contents
from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF
from tests.checkpoint.hostile import HIDING_PLACES
from tests.conversion.convert import to_megatron
from tests.fuzz.loop import deadline, run
from tests.models import tiny

SECONDS = 60.0


@cache
def _original() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    owner = tempfile.TemporaryDirectory(prefix="fuzz-")
    folder = Path(owner.name)
    tiny.write(folder / "source", "qwen3", num_hidden_layers=2)
    to_megatron(folder / "source", folder / "megatron", Layout(2), file_bytes=20_000)
    return owner, folder / "megatron"


def _damage(drawn: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(drawn.choice((1, 1, 5, 50))):
        at = drawn.randrange(len(data) + 1)
        action = drawn.randrange(4)
        if action == 0 and at < len(data):
            data[at] = drawn.randrange(256)
        elif action == 1:
            del data[at : at + drawn.randrange(1, 50)]
        elif action == 2:
            data[at:at] = drawn.randbytes(drawn.randrange(1, 9))
        else:
            data[at:at] = data[at : at + drawn.randrange(1, 50)]
    path.write_bytes(data)


def try_case(number: int) -> None:
    """One damaged copy.

    Raises:
        AssertionError: something in the checkpoint was run.
        Exception: another error than ValueError and OSError, which the command prints as a sentence.
    """
    drawn = random.Random(f"checkpoints {number}")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        copy, ran = Path(folder) / "copy", Path(folder) / "ran"
        shutil.copytree(_original()[1], copy)
        if drawn.random() < 0.2:
            HIDING_PLACES[drawn.choice(("metadata", "planner"))](copy, ran)
        for _ in range(drawn.choice((1, 1, 2))):
            path = drawn.choice(sorted(path for path in copy.iterdir() if path.is_file()))
            _damage(drawn, copy / ".metadata" if drawn.random() < 0.4 else path)
        if drawn.random() < 0.5:
            (copy / manifest.TENSORS).unlink()
        with deadline(SECONDS):
            for look in (
                lambda: contents(copy),
                lambda: manifest.verify(copy),
                lambda: jobs.run(ToHF(copy, copy), Path(folder) / "out", 1, lambda _: None),
            ):
                try:
                    look()
                except (ValueError, OSError):
                    continue
        assert not ran.exists(), "a command in the checkpoint was run"


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(try_case, "checkpoints")
