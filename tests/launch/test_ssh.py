"""From a laptop: a real SSH server is the login node, and only its commands know the cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from .cluster import Cluster, _die_with_parent, _free_ports, wait_until
from .jobs import REPOSITORY, SMALL, write_site

pytestmark = pytest.mark.slurm
PYTHON = REPOSITORY / ".venv-launch" / "bin" / "python"
_SSHD = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
Subsystem sftp internal-sftp
SetEnv SLURM_CONF={config}
"""
_REFUSALS = """\
import json, sys
import nemo_run as run
from megatron_rl.launch import LaunchError, nemo
for options in json.loads(sys.argv[1]):
    try:
        nemo.log_in(run.SSHTunnel(host="127.0.0.1", user="root", **options))
        print("RESULT in")
    except LaunchError as error:
        print("RESULT", str(error).replace("\\n", " "))
"""


@dataclass
class LoginNode:
    port: int
    key: Path
    wrong_key: Path
    environment: dict[str, str]  # the laptop's: no Slurm in it


@pytest.fixture(scope="module")
def login_node(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoginNode]:
    missing = [
        name for name in ("sshd", "ssh", "rsync") if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    missing += [] if PYTHON.exists() else [".venv-launch (make launch-setup)"]
    if missing:
        (pytest.fail if os.environ.get("MEGATRON_RL_CI") else pytest.skip)(f"no {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("login")
    for name in ("host", "key", "wrong"):
        subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)), check=True)
    (port,) = _free_ports(1)
    (folder / "sshd_config").write_text(_SSHD.format(port=port, folder=folder, config=cluster.config))
    # The user's known hosts are left alone.
    (folder / "ssh").write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -o UserKnownHostsFile={folder}/known_hosts "
        f'-o StrictHostKeyChecking=accept-new "$@"\n'
    )
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    assert sshd is not None  # with its full path, or it does not start
    server = subprocess.Popen((sshd, "-D", "-e", "-f", str(folder / "sshd_config")), preexec_fn=_die_with_parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SSH"))}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "NEMORUN_HOME": str(folder / "nemo")}
    try:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 20, "sshd")
        yield LoginNode(port, folder / "key", folder / "wrong", environment)
    finally:
        server.kill()
        server.wait()


def test_a_chain_is_copied_submitted_and_leaves_the_queue_with_its_first_job(
    login_node: LoginNode, cluster: Cluster, tmp_path: Path
) -> None:
    recipe = Path(__file__).parent / f"test-{os.getpid()}.yaml"  # not committed, and packaged nevertheless
    model = {**SMALL["model"], "create": None, "path": "/only/there"}
    recipe.write_text(yaml.safe_dump({**SMALL, "run_dir": "runs/x", "model": model}, sort_keys=False))
    try:
        done = subprocess.run(
            (
                *(str(PYTHON), "-m", "megatron_rl", "launch", str(recipe), "--executor", "slurm", "--nodes", "2"),
                *("--chain", "--name", "chain", "--site", str(write_site(tmp_path)), "--sbatch=--hold"),
                *("--host", "127.0.0.1", "--user", "root", "--port", str(login_node.port)),
                *("--identity", str(login_node.key), "--job-dir", str(tmp_path / "remote")),
            ),
            env=login_node.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
    finally:
        recipe.unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = re.findall(r"Slurm job (\d+)", done.stdout)
    jobs = [cluster.job(number) for number in numbers]
    steps = ("convert", "train", "evaluate", "export")
    assert [job["JobName"].removeprefix("megatron-rl.").partition("-")[0] for job in jobs] == list(steps)
    assert [job["NumNodes"].partition("-")[0] for job in jobs] == ["1", "2", "2", "1"]
    for job, before in zip(jobs[1:], numbers, strict=False):
        assert job["Dependency"].startswith(f"afterok:{before}(")
    for job in jobs:
        code = Path(job["StdOut"]).parent / "code"
        assert code.is_relative_to(tmp_path / "remote")
        cli = Path("megatron_rl", "cli.py")
        assert (code / cli).read_bytes() == (REPOSITORY / cli).read_bytes()
        assert (code / "tests" / "launch" / recipe.name).exists()
    (script,) = Path(jobs[1]["StdOut"]).parents[1].glob("train-*_sbatch.sh")
    assert f"run_dir={tmp_path}/remote/runs/x" in script.read_text()

    cluster.run("scancel", numbers[0])
    cluster.run("scontrol", "release", ",".join(numbers[1:]))
    for number in numbers[1:]:
        wait_until(lambda number=number: cluster.state(number) == "CANCELLED", 60, f"the end of job {number}")


def test_a_login_node_that_cannot_be_used_is_named_with_the_reason(login_node: LoginNode, tmp_path: Path) -> None:
    key, (unused,) = str(login_node.key), _free_ports(1)
    (tmp_path / "file").write_text("")
    good = {"port": login_node.port, "identity": key, "job_dir": str(tmp_path / "jobs")}
    cases = [
        (good, r"^in$"),
        ({**good, "port": unused}, rf"root@127\.0\.0\.1 \(port {unused}\) cannot be reached: .*Unable to connect"),
        (
            {**good, "identity": str(login_node.wrong_key)},
            r"does not let you in: neither the key .*wrong nor a password",
        ),
        ({**good, "identity": str(tmp_path / "none")}, r"--identity .*/none: no such file"),
        ({**good, "job_dir": str(tmp_path / "file" / "x")}, r"Not a directory.*--job-dir has to be a folder"),
        ({**good, "pre_command": "sbatch() { echo no such command >&2; return 127; }"}, r"--pre-command"),
    ]
    done = subprocess.run(
        (str(PYTHON), "-c", _REFUSALS, json.dumps([options for options, _ in cases])),
        cwd=REPOSITORY,
        env=login_node.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,  # no terminal: nobody is asked for a password
    )
    said = re.findall(r"^(?:Password: )*RESULT (.*)$", done.stdout, re.MULTILINE)
    assert len(said) == len(cases), done.stdout + done.stderr
    for text, (_, expected) in zip(said, cases, strict=True):
        assert re.search(expected, text), text
