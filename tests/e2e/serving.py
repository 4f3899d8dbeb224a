"""vLLM's OpenAI server in a process of its own, as a user starts it on a CPU, but for its imports: it and its engine are
forks of a process that has imported everything."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from pathlib import Path

from megatron_rl.runtime import process
from megatron_rl.runtime.server import end
from tests import shared_memory
from tests.warm import Warm

SERVER = Path(__file__).with_name("forking_server.py")


class VllmServer:
    """Starts at once; `url` waits until it answers (on a busy machine minutes). `stop` ends it."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base, self.log = f"http://127.0.0.1:{port}", log
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
        }
        arguments = [str(SERVER), "--model", str(folder)]
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32"]
        arguments += ["--enforce-eager", *options]
        with log.open("wb") as file:
            self.process = Warm(arguments, environment, stdout=file, stderr=file, own_session=True)

    def url(self, seconds: float = 600) -> str:
        deadline = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(f"{self.base}/health", timeout=5).read()
                return f"{self.base}/v1"
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.2)

    def stop(self) -> None:
        """Nothing of what it has in shared memory is left."""
        held = shared_memory.held(process.session(self.process.pid))
        end(self.process)
        assert not held & shared_memory.names()
