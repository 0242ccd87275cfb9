"""Servers of one's own for a while: Redis, and an S3 endpoint (moto's), each on a free port."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from importlib.util import find_spec
from typing import Self

from cacheblend_rag import EngineUnavailableError

START_SECONDS = 300.0
HOST = "127.0.0.1"
BUCKET = "chunks"
S3_CREDENTIALS: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1",
}  # fmt: skip
"""moto lets everybody in, but asks for a name."""
GET_REDIS = "apt-get install -y redis-server"
GET_S3 = "pip install 'moto[s3]' flask flask-cors"


class Server:
    """A process that listens on a port; started and ended here.

    command: how to start it, ``{port}`` where the port stands. port: the one it had, a free one by
    default.
    """

    def __init__(self, command: Sequence[str], port: int | None = None) -> None:
        self.port = port or free_port()
        self._command = [word.format(port=self.port) for word in command]
        self.start()

    @property
    def address(self) -> str:
        """Where it answers HTTP."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it listens; raises EngineUnavailableError."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + START_SECONDS
        while not _listens(self.port):
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise EngineUnavailableError(f"{self._command[0]} does not start")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once, as a failing machine would."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Let it answer nothing for now, its connections left open."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo pause."""
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def redis_server(*options: str) -> Server:
    """Start a Redis that keeps nothing on disk; raises EngineUnavailableError without one."""
    found = shutil.which("redis-server")
    if found is None:
        raise EngineUnavailableError(f"redis-server is not installed: {GET_REDIS}")
    quiet = ["--bind", HOST, "--save", "", "--appendonly", "no"]
    return Server([found, "--port", "{port}", *quiet, *options])


def s3_server() -> Server:
    """Start an S3 endpoint with a bucket; raises EngineUnavailableError when moto is not there."""
    if find_spec("moto") is None or find_spec("flask_cors") is None:
        raise EngineUnavailableError(f"moto is not installed: {GET_S3}")
    server = Server([sys.executable, "-m", "moto.server", "-H", HOST, "-p", "{port}"])
    made = HTTPConnection(HOST, server.port, timeout=START_SECONDS)
    made.request("PUT", f"/{BUCKET}")
    made.getresponse().read()
    made.close()
    for name, value in S3_CREDENTIALS.items():
        os.environ.setdefault(name, value)
    return server


def redis_url(server: Server, options: str = "") -> str:
    """Return the URL of a tier on a Redis server, with options as in a query."""
    return f"redis://{HOST}:{server.port}/0?{options}"


def s3_url(server: Server, prefix: str, options: str = "") -> str:
    """Return the URL of a tier on an S3 endpoint, with options as in a query."""
    return f"s3://{BUCKET}/{prefix}?endpoint={server.address}&{options}"


def free_port() -> int:
    """Return a port that nobody listens on just now."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return int(taken.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        asked.settimeout(1.0)
        return asked.connect_ex((HOST, port)) == 0
