"""A vLLM server on this machine, as ``cacheblend-rag serve`` starts it, for a while."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from cacheblend_rag.engines.vllm.serve import HOST, server_command, server_environment

START_SECONDS = 600.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class RunningServer:
    """A server in a process group of its own. log: the file that its output goes to."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """End the server and all its workers."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)

    def wait_until_ready(self) -> None:
        """Return once it answers; fails with its log when it ends or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            said = self.log.read_text(errors="replace")
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=2):  # noqa: S310
                return True
        except (OSError, HTTPException):
            return False


@contextmanager
def running_server(
    model: str | Path,
    *,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """Serve ``model`` until the block is left; options: as for server_command."""
    if port is None:
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
    command = server_command(model, host=HOST, port=port, **options)
    with tempfile.TemporaryDirectory(prefix="cacheblend-server-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **server_environment(), **(environment or {})},
                start_new_session=True,
            )
        server = RunningServer(f"http://{HOST}:{port}", process, log)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()
