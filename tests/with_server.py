"""Run a command beside a vLLM server of the bundled model: ``python with_server.py pytest ...``.

The command finds the server's URL in CACHEBLEND_TEST_ENGINE; where that is set already, no other
server is started.
"""

from __future__ import annotations

import os
import subprocess
import sys

from toy import TOY
from vllm_server import running_server

VARIABLE = "CACHEBLEND_TEST_ENGINE"
FLAGS = ("--dtype", "float32", "--enforce-eager")
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def main(command: list[str]) -> int:
    if VARIABLE in os.environ:
        return subprocess.call(command)
    environment = {**SMALL, **{name: os.environ[name] for name in SMALL if name in os.environ}}
    with running_server(TOY, served_name="toy", flags=FLAGS, environment=environment) as server:
        return subprocess.call(command, env={**os.environ, VARIABLE: server.url})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
