"""`make check-gpu-set`: installs what GPU machines install into a folder of its own, and tries all of it that needs no card.

The folder is kept: what is installed and compiled there is used again. `--break` shows that a fault is seen.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
REQUIREMENTS = ROOT / "requirements"
UV = ROOT / ".uv" / "bin" / "uv"  # make has brought it
STAND_INS = {"libcuda.so.1": "cuda.c", "libnvidia-ml.so.1": "nvml.c"}
BAD_PAIR = (
    "cuda-bindings==13.5.0",
    "cuda-python==12.6.2.post1",
)  # what the unpinned set resolved to; the second overwrites
KERNEL = "__global__ void twice(float *x) { x[threadIdx.x] *= 2; }\n"
SELF_TEST = ("versions", "actor")  # what neither needs a card nor, as every update does, a kernel of Transformer Engine
PLANNED = ("scale/qwen3-8b", "scale/qwen3-30b-a3b", "scale/qwen3-235b-a22b-fp8")


class Failed(Exception):
    """A step's verdict, in a line."""


@dataclass
class Bench:
    """Where the set is, what is broken on purpose, and what the steps have said."""

    scratch: Path
    python: str  # that makes the environment
    cuda: Path
    broken: str = ""
    only: Sequence[str] = ()
    rows: list[tuple[str, str, float, str]] = field(default_factory=list)  # step, verdict, seconds, what it says

    @property
    def own(self) -> Path:
        """The set's Python."""
        return self.scratch / "venv" / "bin" / "python"

    def environment(self, *, nvml: bool = True) -> dict[str, str]:
        """Variables of a process beside the stand-ins."""
        folders = [self.scratch / "stand-ins" / name for name in STAND_INS if nvml or name == "libcuda.so.1"]
        own = {
            "LD_LIBRARY_PATH": ":".join(map(str, folders)),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{self.own.parent}:{self.cuda / 'bin'}:{os.environ['PATH']}",
            "CUDA_HOME": str(self.cuda),
            "OMP_NUM_THREADS": "1",
        }
        if self.broken == "cache":  # a home that cannot be made, as in a container that does not mount it
            own |= {"HOME": "/dev/null/home"}
        kept = {name: value for name, value in os.environ.items() if self.broken != "cache" or "CACHE" not in name}
        return kept | own

    def run(self, step: str, command: Sequence[str | Path], *, nvml: bool = True, minutes: float = 60) -> str:
        """Output of a command, which is kept in a log.

        Raises:
            Failed: it failed; with its last lines that say why.
        """
        log = self.scratch / "logs" / f"{step}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=self.environment(nvml=nvml), stdout=file, stderr=file, timeout=minutes * 60
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Failed(f"{error}") from None
        said = log.read_text(errors="replace")
        if code:
            lines = [line.strip() for line in said.splitlines() if line.strip()]
            wrong = [line for line in lines if line.startswith(("wrong:", "setup-gpu:"))] or lines[-1:]
            raise Failed(f"{' '.join(wrong)[:600]} (log: {log})")
        return said

    def inside(self, step: str, *arguments: str, minutes: float = 60) -> str:
        """What a step of `tools.gpu_set.inside` has found."""
        said = self.run(step, [self.own, "-m", "tools.gpu_set.inside", step, *arguments], minutes=minutes)
        return re.findall(r"^found: (.*)", said, re.MULTILINE)[-1]


def toolkit(bench: Bench) -> str:
    """nvcc of CUDA 13, and a kernel that it compiles for a H100."""
    bench.run("toolkit", [bench.python, REQUIREMENTS / "check_gpu.py", "--no-driver", "before"])
    source = bench.scratch / "twice.cu"
    source.write_text(KERNEL)
    nvcc = bench.cuda / "bin" / "nvcc"
    bench.run("toolkit", [nvcc, "-arch=sm_90a", "-cubin", "-o", bench.scratch / "twice.cubin", source])
    return bench.run("toolkit", [nvcc, "--version"]).split("release ")[-1].partition(",")[0]


def packages(bench: Bench) -> str:
    """Everything in requirements/gpu.txt, by its hashes."""
    bench.run("packages", ["make", "gpu-packages", f"GPU_VENV={bench.scratch / 'venv'}", f"PYTHON={bench.python}"])
    if bench.broken == "pins":
        for pin in BAD_PAIR:
            bench.run("packages", [UV, "pip", "install", "--python", bench.own, "--no-deps", pin])
    else:  # what an earlier --break=pins has left
        bench.run("packages", [bench.own, "-c", "import cuda.bindings.runtime as own; own.cudaLibrary_t"])
    return f"{len(re.findall('^[a-z].*==', (REQUIREMENTS / 'gpu.txt').read_text(), re.MULTILINE))} packages"


def transformer_engine(bench: Bench) -> str:
    """Its PyTorch part, compiled and linked by setup-gpu's own commands; kept for this torch, Python and source."""
    text = (REQUIREMENTS / "transformer-engine.txt").read_text() + (REQUIREMENTS / "gpu.txt").read_text()
    against = re.findall(r"^(?:transformer-engine|torch|pybind11|nvidia)\S*==\S+", text, re.MULTILINE)
    version = bench.run("transformer-engine", [bench.own, "-c", "import sys; print(sys.version)"])
    wheels = bench.scratch / "wheels" / hashlib.sha256(" ".join([version, *against]).encode()).hexdigest()[:12]
    kept = any(wheels.glob("*.whl"))
    if kept:
        wheel = next(iter(wheels.glob("*.whl")))
        bench.run("transformer-engine", [UV, "pip", "install", "--python", bench.own, "--no-deps", wheel])
    else:
        settings = [f"GPU_VENV={bench.scratch / 'venv'}", f"TE_WHEELS={wheels}", f"CUDA_HOME={bench.cuda}"]
        bench.run("transformer-engine", ["make", "transformer-engine", *settings], minutes=180)
    return "compiled before" if kept else "compiled and linked"


def stand_ins(bench: Bench) -> str:
    """The driver's library, which says that there is no device, and NVML, which claims eight H100."""
    for library, source in STAND_INS.items():
        folder = bench.scratch / "stand-ins" / library
        folder.mkdir(parents=True, exist_ok=True)
        compiler: list[str | Path] = ["cc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
        bench.run("stand-ins", [*compiler, "-o", folder / library, HERE / source])
    probe = "import pynvml as n; n.nvmlInit(); print('cards', n.nvmlDeviceGetCount())"
    return bench.run("stand-ins", [bench.own, "-W", "ignore", "-c", probe]).strip()


def files(bench: Bench) -> str:
    """Versions are the lock's, and no package has overwritten files of another."""
    return bench.inside("files")


def imports(bench: Bench) -> str:
    """Every compiled part loads, Transformer Engine's too."""
    return bench.inside("imports")


def forks(bench: Bench) -> str:
    """What ranks import leaves no thread, process or started driver: a machine's ranks can be forks."""
    return bench.inside("forks")


def configurations(bench: Bench) -> str:
    """vLLM's configuration of every recipe for GPUs, by the options that our engine is started with."""
    extra = ["--option", "unknown_to_vllm"] if bench.broken == "option" else []
    return bench.inside("configurations", *_only(bench), *extra)


def models(bench: Bench) -> str:
    """vLLM's CUDA models against the plan of the weight sync: names, shapes, what is written in place."""
    return bench.inside("models", *_only(bench))


def exact(bench: Bench) -> str:
    """vLLM's CUDA models with `rollout.exact`: which module computes with what."""
    return bench.inside("exact", *_only(bench))


def layers(bench: Bench) -> str:
    """Transformer Engine's layers of the recipes' actors, against the map of the weights."""
    return bench.inside("layers", *_only(bench))


def _only(bench: Bench) -> list[str]:
    return ["--only", *bench.only] if bench.only else []


def plan(bench: Bench) -> str:
    """`megatron-rl plan --exact` in this environment."""
    for recipe in bench.only or PLANNED:
        bench.run("plan", [bench.own, "-m", "megatron_rl", "plan", "--exact", f"recipes/{recipe}.yaml"], nvml=False)
    return f"{len(bench.only or PLANNED)} recipes"


def self_test(bench: Bench) -> str:
    """The self-test's steps that need neither card nor engine."""
    folder = bench.scratch / "self-test"
    shutil.rmtree(folder, ignore_errors=True)
    command = ("-m", "megatron_rl", "selftest", "--run-dir", folder, "--only", *SELF_TEST)
    bench.run("self-test", [bench.own, *command], nvml=False)
    return ", ".join(SELF_TEST)


STEPS: dict[str, Callable[[Bench], str]] = {
    "toolkit": toolkit,
    "packages": packages,
    "transformer-engine": transformer_engine,
    "stand-ins": stand_ins,
    "files": files,
    "imports": imports,
    "forks": forks,
    "configurations": configurations,
    "models": models,
    "exact": exact,
    "layers": layers,
    "plan": plan,
    "self-test": self_test,
}
# What is broken on purpose, the steps that run then, and the one that has to notice.
BREAKS = {
    "pins": (("packages", "stand-ins", "files"), "files"),
    "nvcc": (("toolkit",), "toolkit"),
    "cache": (("stand-ins", "imports"), "imports"),
    "option": (("stand-ins", "configurations"), "configurations"),
}


def check(bench: Bench, names: Sequence[str]) -> str | None:
    """Runs steps in order, prints a line each; the first that fails ends it and is returned."""
    for name in names:
        begin = time.monotonic()
        try:
            verdict, said = "ok", STEPS[name](bench)
        except Failed as error:
            verdict, said = "FAILED", str(error)
        row = (name, verdict, time.monotonic() - begin, said)
        bench.rows.append(row)
        print(f"{name:20}{verdict:8}{row[2]:7.0f} s  {said}", flush=True)
        if verdict == "FAILED":
            return name
    return None


def page(bench: Bench) -> str:
    """The report: versions, and a row per step."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (REQUIREMENTS / "gpu.txt").read_text(), re.MULTILINE))
    named = ("torch", "vllm", "megatron-core", "transformer-engine", "flashinfer-python", "nvidia-cudnn-cu13")
    head = f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, no card: " + ", ".join(
        f"{name} {pins[name]}" for name in named
    )
    rows = [
        f"| `{name}` | {(STEPS[name].__doc__ or '').partition(chr(10))[0]} | {verdict}: {said} | {seconds:.0f} |"
        for name, verdict, seconds, said in bench.rows
    ]
    return "\n".join([head, "", "| step | what | verdict | seconds |", "|---|---|---|---|", *rows, ""])


def main() -> int:
    parser = argparse.ArgumentParser(prog="make check-gpu-set", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / "build" / "gpu-set", help="10 GB; used again if it is there"
    )
    parser.add_argument("--python", default=sys.executable, help="a Python 3.12")
    parser.add_argument("--cuda", type=Path, default=Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--only", nargs="+", default=[], metavar="FOLDER/RECIPE", help="instead of every recipe")
    parser.add_argument("--break", dest="broken", choices=BREAKS, help="break this, and say whether it is noticed")
    args = parser.parse_args()
    scratch = args.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    bench = Bench(scratch, args.python, args.cuda, args.broken or "", args.only)
    if args.broken is None:
        failed = check(bench, args.steps)
        (scratch / "report.md").write_text(page(bench))
        print(f"report: {scratch / 'report.md'}")
        return 1 if failed else 0
    bench.only = args.only or PLANNED[:1]
    if args.broken == "nvcc":
        os.environ["CUDA_HOME"] = str(scratch / "no-toolkit")
        bench.cuda = scratch / "no-toolkit"
    steps, notices = BREAKS[args.broken]
    noticed = check(bench, steps) == notices
    if args.broken == "pins":
        names = (pin.partition("==")[0] for pin in BAD_PAIR)
        bench.run("packages", [UV, "pip", "uninstall", "--python", bench.own, *names])
    print(f"--break={args.broken}: {'noticed' if noticed else 'NOT NOTICED'}")
    return 0 if noticed else 1


if __name__ == "__main__":
    sys.exit(main())
