"""`convert to-megatron` and `convert to-hf`."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.runtime import exit_codes


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    forms = parser.add_subparsers(dest="direction", metavar="to-megatron|to-hf", required=True)
    for direction, add, text in (
        ("to-megatron", add_to_megatron, "Hugging Face folder -> Megatron distributed checkpoint"),
        ("to-hf", add_to_hf, "Megatron distributed checkpoint -> Hugging Face folder"),
    ):
        add(forms.add_parser(direction, help=text, description=text))


def add_to_megatron(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="source: config.json and safetensors")
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="folder to make")
    layout = parser.add_argument_group("layout", "what the files are cut for; any other layout reads them too")
    layout.add_argument("--tensor", type=int, default=1, metavar="N", help="tensor parallelism; pads the vocabulary")
    layout.add_argument("--pipeline", type=int, default=1, metavar="N", help="pipeline parallelism")
    layout.add_argument("--expert", type=int, default=1, metavar="N", help="expert parallelism")
    layout.add_argument("--expert-tensor", type=int, default=1, metavar="N", help="ranks that each expert is cut over")
    parser.add_argument(
        "--for",
        dest="program",
        choices=("megatron-lm", "bridge"),
        help="also write the folders and files that Megatron-LM or Megatron-Bridge loads from",
    )
    _add_common(parser, ("keep", "bf16", "fp32"), "2GB")


def add_to_hf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="source: a checkpoint's folder")
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder with the model's config.json and tokenizer, where the checkpoint does not tell",
    )
    parser.add_argument(
        "--master-weights", action="store_true", help="take the optimizer's fp32 weights of a training checkpoint"
    )
    parser.add_argument(
        "--any-padding", action="store_true", help="rows that pad the vocabulary may hold anything, not only zeros"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="of a checkpoint of LoRA's adapters: write them as PEFT's folder, instead of the merged model",
    )
    _add_common(parser, ("keep", "bf16", "fp32", "fp8"), "5GB")


def _add_common(parser: argparse.ArgumentParser, dtypes: Sequence[str], size: str) -> None:
    parser.add_argument("--dtype", choices=dtypes, default="keep", help="of the result's weights (default: keep)")
    parser.add_argument("--shard-size", type=_bytes, default=_bytes(size), metavar="SIZE", help=f"default {size}")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every tensor back and compare it with the source; compare logits with transformers where they fit",
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0, 2 for a source or folder that cannot be converted, 1 where writing failed or the result is not right."""
    from megatron_rl.checkpoint.convert.convert import Mismatch, convert

    try:
        convert(args, lambda text: print(text, flush=True))
    except Mismatch as error:
        print(f"megatron-rl convert: --verify failed: {error}", file=sys.stderr)
        return exit_codes.FAILED
    except ValueError as error:
        print(f"megatron-rl convert: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room, then the same command continues" if full else "the same command continues"
        print(f"megatron-rl convert: {error}; {remedy}", file=sys.stderr)
        return exit_codes.FAILED
    except KeyboardInterrupt:
        print("megatron-rl convert: stopped; the same command continues", file=sys.stderr)
        return 130
    return exit_codes.OK


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


def _bytes(text: str) -> int:
    unit = next((unit for unit in _UNITS if text.upper().endswith(unit)), "")
    number, size = text[: len(text) - len(unit)], _UNITS.get(unit, 1)
    try:
        value = int(float(number) * size)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 5GB or 500MB") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1 byte")
    return value
