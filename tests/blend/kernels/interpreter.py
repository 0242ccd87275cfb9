"""Runs test modules in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_interpreted(*tests: str) -> None:
    """Run files of tests, given from the checkout's root, and expect them to pass.

    In a process of its own: Triton reads the variable when a kernel is defined.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
