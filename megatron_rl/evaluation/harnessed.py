"""`megatron-rl evaluate --harness`: another project's package asks a served model and grades it; its figures become ours.

The model is served by vLLM's OpenAI-compatible server, started here where no endpoint is given.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from megatron_rl.config.schema import Config
from megatron_rl.evaluation import response_log as kept
from megatron_rl.evaluation.answers import Answers, Log, guarded, resume_responses, write_evaluation
from megatron_rl.evaluation.harnesses import HARNESSES, Graded, Job, programs, version
from megatron_rl.evaluation.statistics import Interval, mean, pass_at_k
from megatron_rl.evaluation.summary import TaskSummary, passes
from megatron_rl.rollout.endpoint_engine import find_server
from megatron_rl.runtime import exit_codes
from megatron_rl.runtime.attempts import free_port
from megatron_rl.runtime.logs import last_lines
from megatron_rl.runtime.process import die_with_parent, variables_for_another_python
from megatron_rl.runtime.server import VLLM, end, wait_until_healthy

FOLDER = "harness"  # below the run folder, once all is done
_SHOWN = 15  # last lines of what failed
_LOOK = 0.5  # seconds between two looks at the programs
_ASK = 30  # seconds between two questions to a server elsewhere
_GONE = 300  # seconds without an answer after which it is lost


def evaluate_by_harness(log: Log, urls: Sequence[str], name: str | None, gpus: int) -> int:
    """Runs the harness of the recipe on `model.path`, and returns the exit code.

    Args:
        urls: base URL of a server of the model; none: one is started.
        name: the model's name there; None: the only one.
        gpus: of this machine.
    """
    return guarded(log, lambda: _evaluate(log, urls, name, gpus))


def _evaluate(log: Log, urls: Sequence[str], name: str | None, gpus: int) -> int:
    began, config = time.monotonic(), log.config
    section = config.evaluation.harness
    assert section.name is not None
    assert config.model.path is not None
    model = {
        "harness": asdict(section),
        "version": version(section.name),
        "model": config.model.path,
        "urls": list(urls),
    }
    resume_responses(log, {**model, "files": kept.files_of(Path(config.model.path))}, {})
    log.begin("evaluation", 0, 1)
    folder = (log.run_dir / kept.FOLDER).resolve()
    with contextlib.ExitStack() as stack:
        process = None
        if not urls:
            log.phase("starting vLLM's server")
            process, port = stack.enter_context(_served(log, folder / "server.log", gpus))
            urls = [f"http://127.0.0.1:{port}/v1"]
        server = find_server(urls, name, config.evaluation.endpoint, longest=0)
        if section.name == "bfcl" and server.name != config.model.path:
            raise ValueError(
                f"bfcl asks for the model by its folder, {config.model.path}, and {urls[0]} serves it as {server.name!r}: "
                f"serve it without --served-model-name, from the same path"
            )
        job = Job(config, server, folder)
        _run(log, job, process)
    harness = HARNESSES[section.name]
    graded = list(harness.read(job))
    answers = Answers(config, [_summary(config, one) for one in graded])
    n = config.trainer.eval_rollouts
    answers.totals = {
        f"eval/{set_}/avg@{n}": Interval(value, None, None, None, 0) for set_, value in harness.totals(job).items()
    }
    write_evaluation(log, model, answers, {}, began)
    shutil.rmtree(log.run_dir / FOLDER, ignore_errors=True)
    folder.rename(log.run_dir.resolve() / FOLDER)
    log.note(f"all that {section.name} wrote is in {log.run_dir / FOLDER}")
    return _verdict(config, graded)


@contextlib.contextmanager
def _served(log: Log, output: Path, gpus: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server of `model.path`, with room for all that the model takes, and its port; it ends with the context."""
    config, port = log.config, free_port()
    command = [sys.executable, *VLLM, "--model", str(config.model.path), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", config.model.dtype, "--tensor-parallel-size", str(config.rollout.tensor_parallel)]
    command += ["--generation-config", "vllm"]  # not the folder's own: the harness says how it samples
    variables = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    if not gpus:
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(config.rollout.cpu_cache_gib * 2**30))]
        # Its threads are to sleep while they wait, as those of ranks (`attempts.rank_environment`).
        variables.setdefault("OMP_WAIT_POLICY", "passive")
    process = _start(command, output, variables)
    try:
        wait_until_healthy(process, port, log.note)
        if process.poll() is not None:
            raise OSError(_failed("vLLM's server", process.returncode, output))
        yield process, port
    finally:
        end(process)


def _start(command: Sequence[str], output: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )


def _run(log: Log, job: Job, server: subprocess.Popen[bytes] | None) -> None:
    """The harness's commands, one after the other.

    Raises:
        OSError: one that failed, or the server did, with its last lines; or a server elsewhere that no longer answers, which
            some harnesses would ask for ever.
    """
    name, endpoint = str(job.config.evaluation.harness.name), job.config.evaluation.endpoint
    harness, output = HARNESSES[name], job.folder / f"{name}.log"
    # Never the user's own key of another service.
    key = os.environ[endpoint.api_key_env] if endpoint.api_key_env is not None else "none"
    harness.prepare(job)
    for program, *arguments in harness.commands(job):
        log.phase(f"{program} {arguments[0]}")
        log.note(f"{program} {' '.join(arguments)}\nits output is in {output}")
        variables = {**variables_for_another_python(), harness.key: key, **harness.variables(job)}
        process = _start([str(programs(name) / program), *arguments], output, variables)
        last_health_check = answered = time.monotonic()
        try:
            while process.poll() is None:
                if server is not None and server.poll() is not None:
                    raise OSError(_failed("vLLM's server", server.returncode, job.folder / "server.log"))
                if server is None and time.monotonic() - last_health_check > _ASK:
                    last_health_check = time.monotonic()
                    try:
                        find_server(job.server.urls, job.server.name, endpoint, longest=0)
                        answered = time.monotonic()
                    except ValueError as error:
                        if (silent := time.monotonic() - answered) > _GONE:
                            raise OSError(f"no answer for {silent:.0f} s: {error}") from None
                time.sleep(_LOOK)
        finally:
            end(process)
        if process.returncode:
            raise OSError(_failed(program, process.returncode, output))


def _failed(what: str, code: int, output: Path) -> str:
    return f"{what} ended with exit code {code}; from {output}:\n" + "\n".join(last_lines(output, _SHOWN))


def _summary(config: Config, graded: Graded) -> TaskSummary:
    n, share = config.trainer.eval_rollouts, config.evaluation.confidence
    drawn = sorted({len(row) for row in graded.grades})
    if drawn != [n]:
        raise ValueError(f"{graded.name} has {drawn} responses per question, and `trainer.eval_rollouts` is {n}")
    bounded = all(0 <= grade <= 1 for row in graded.grades for grade in row)
    estimates = {f"eval/{graded.name}/avg@{n}": mean([fmean(row) for row in graded.grades], share, bounded)}
    for k in passes(config):
        right = [sum(grade >= 1 for grade in row) for row in graded.grades]
        estimates[f"eval/{graded.name}/pass@{k}"] = mean([pass_at_k(n, count, k) for count in right], share)
    questions = len(graded.grades)
    return TaskSummary(graded.name, questions, n * questions, graded.failed, 0, (graded.graded_by, 1.0), estimates)


def _verdict(config: Config, graded: Sequence[Graded]) -> int:
    """Reports failed requests, which the harness counts as wrong; more than the recipe tolerates make the command fail."""
    failed, count = sum(one.failed for one in graded), sum(len(one.grades) for one in graded)
    if not failed:
        return exit_codes.OK
    allowed = config.evaluation.endpoint.max_failed_share
    print(
        f"megatron-rl: {failed} of {count} requests failed (evaluation.endpoint.max_failed_share = {allowed:g}), and count "
        f"as wrong: the harness's results in {Path(config.run_dir) / FOLDER} say why",
        file=sys.stderr,
    )
    return exit_codes.FAILED if failed / count > allowed else exit_codes.OK
