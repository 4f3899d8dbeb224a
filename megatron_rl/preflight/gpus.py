"""Health of this node's GPUs, from nvidia-smi and the kernel log; whether a process sees those that it needs; and whether
kernels can be compiled for them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from megatron_rl.config.machine import count_gpus
from megatron_rl.config.schema import Config
from megatron_rl.preflight.verdict import FAILED, WARNING, Problems
from megatron_rl.runtime import compilers
from megatron_rl.runtime.disk import size_text

_ANSWER = 60.0  # seconds within which nvidia-smi and dmesg answer
_DRIVER = 580  # the oldest for CUDA 13, which torch, vLLM and Transformer Engine are built for

# What the driver writes to the kernel log about a GPU, by NVIDIA's numbers: those that are not a program's own fault.
_XID = re.compile(r"^(?:\[ *(\d+)\.\d+\] )?NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)", re.MULTILINE)
_XIDS = {
    48: "an uncorrectable memory error",
    64: "damaged memory rows that could not be replaced",
    74: "an NVLink error",
    79: "the GPU fell off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
}


def check_gpus(config: Config) -> Problems:
    """Memory errors, memory that another process holds, and what the kernel log says where it may be read."""
    if shutil.which("nvidia-smi") is None:
        return
    if shutil.which("dmesg"):
        _, kernel_log, _ = _said("dmesg")  # empty where the system keeps its log from users
        yield from xid_problems(kernel_log, float(Path("/proc/uptime").read_text().split()[0]))
    fields = "index,uuid,ecc.errors.uncorrected.volatile.total,remapped_rows.failure,remapped_rows.pending"
    fields += ",memory.used,memory.total"
    code, rows, errors = _said("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if code is None:
        yield FAILED, f"nvidia-smi has not answered for {_ANSWER:.0f} s: a GPU or its driver hangs; drain the node"
    elif code:
        yield FAILED, f"nvidia-smi fails: {next(iter((rows + errors).strip().splitlines()), code)}"
    else:
        yield from driver_problems(_said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")[1])
        yield from gpu_problems(rows, config.rollout.memory_fraction, os.environ.get("CUDA_VISIBLE_DEVICES"))


def check_devices(config: Config) -> Problems:
    """This process sees the GPUs of all processes of its node: vLLM takes the one with the number LOCAL_RANK among them."""
    present = count_gpus()
    if not present:
        return
    import torch

    seen, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not seen:
        yield (
            FAILED,
            f"torch {torch.__version__} can use none of the {present} GPUs here: it is a build for CPUs, or the driver is "
            f"older than {_DRIVER}; hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU",
        )
    elif seen < local:
        yield (
            FAILED,
            f"a process sees {seen} of the GPUs of its node, on which {local} processes run, and vLLM takes the one with the "
            "number LOCAL_RANK: every process must see all of them; start without --gpus-per-task and --gpu-bind, and with "
            "the same CUDA_VISIBLE_DEVICES for all",
        )


def check_caches(config: Config) -> Problems:
    """A file can be written where each compiler keeps what it has made."""
    for name in compilers.CACHES if count_gpus() else ():
        folder = Path(os.environ.get(name, "")).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
                file.write(bytes(4096))
                file.flush()
        except OSError as error:
            yield (
                FAILED,
                f"{name} {folder} cannot be written ({error.strerror}), and compiled kernels are kept there: "
                f"{compilers.CACHE}=FOLDER names a folder of the node's own disk, in a container one that is mounted there",
            )


def check_compilers(config: Config) -> Problems:
    """`nvcc` and `ninja`, which vLLM's FP8 products and FlashInfer call during the run."""
    if not count_gpus():
        return
    programs = compilers.programs(os.environ)
    missing = [name for name, program in programs.items() if program is None]
    remedy = "load the module of a CUDA 13 toolkit in site_setup (slurm/site.sh), or set CUDA_HOME"
    if config.rollout.fp8 != "none":
        if missing:
            yield FAILED, f"no {' and no '.join(missing)} here, and rollout.fp8 compiles its kernels: {remedy}"
        elif (version := compilers.nvcc_version(str(programs["nvcc"]))) is None or version < compilers.NVCC:
            said = "does not say its version" if version is None else f"is of CUDA {version[0]}.{version[1]}"
            least = ".".join(map(str, compilers.NVCC))
            yield (
                FAILED,
                f"{programs['nvcc']} {said}, and rollout.fp8 compiles its kernels with {least} or newer: {remedy}",
            )
    elif missing and importlib.util.find_spec("flashinfer") and not importlib.util.find_spec("flashinfer_cubin"):
        yield (
            WARNING,
            f"no {' and no '.join(missing)} here: vLLM goes without FlashInfer's kernels, and is slower; {remedy}",
        )


def compiler_facts(config: Config) -> dict[str, str]:
    """Whether each program is there: a node that lacks one would compute by other kernels than the rest."""
    found = compilers.programs(os.environ) if count_gpus() else {}
    return {name: "there" if program else "missing" for name, program in found.items()}


def driver_problems(rows: str) -> Problems:
    """Reads nvidia-smi's lines, one driver version per GPU."""
    for version in dict.fromkeys(rows.split()):
        if version.partition(".")[0].isdigit() and int(version.partition(".")[0]) < _DRIVER:
            yield (
                FAILED,
                f"the NVIDIA driver is {version}, and CUDA 13 needs {_DRIVER} or newer: have it updated (where NVIDIA's "
                "compatibility libraries are installed instead: launch.preflight=off)",
            )


def _said(*command: str) -> tuple[int | None, str, str]:
    """Exit code (None where it does not answer), standard output and errors of a program."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=_ANSWER)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: what hangs in a driver does not die
        return None, "", ""
    return process.returncode, out, errors


def gpu_problems(rows: str, memory_fraction: float, visible: str | None = None) -> Problems:
    """Reads nvidia-smi's lines `index, UUID, uncorrected errors, remapping failed, … pending, MiB used, MiB in all`.

    nvidia-smi shows GPUs that are not the job's, too: only those that `visible` (CUDA_VISIBLE_DEVICES) names are looked at.
    """
    own = None if visible is None else [name.strip() for name in visible.split(",")]
    for row in rows.splitlines():
        index, uuid, errors, remap, pending, used, total = [cell.strip() for cell in row.split(",")]
        if own is not None and not any(name == index or (name[:4] == "GPU-" and uuid.startswith(name)) for name in own):
            continue
        if errors.isdigit() and int(errors):
            yield FAILED, f"GPU {index} has {errors} uncorrected memory errors since it was reset; drain the node"
        if remap in ("1", "Yes"):
            yield FAILED, f"GPU {index} could not replace damaged memory rows; the board is to be exchanged"
        if pending in ("1", "Yes"):
            yield (
                WARNING,
                f"GPU {index} has damaged memory rows that it replaces when it is reset; have the node drained",
            )
        if used.isdigit() and total.isdigit() and 1 - int(used) / int(total) < memory_fraction:
            yield (
                FAILED,
                f"GPU {index}: {size_text(int(used) * 2**20)} of {size_text(int(total) * 2**20)} are in use by other "
                f"processes, and the engine wants {memory_fraction:.0%} (rollout.memory_fraction)",
            )


def xid_problems(kernel_log: str, uptime: float) -> Problems:
    """The newest Xid error of each kind and GPU, from dmesg's lines. Warnings: a reset since then is not in the log."""
    newest = {(bus, int(code)): seconds for seconds, bus, code in _XID.findall(kernel_log)}
    for (bus, code), seconds in newest.items():
        if code in _XIDS:
            when = f" {(uptime - int(seconds)) / 3600:.1f} h ago" if seconds else ""
            yield WARNING, f"the GPU at {bus} had Xid {code}{when}: {_XIDS[code]}; unless it was reset, drain the node"
