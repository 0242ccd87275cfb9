"""Step: the project's tests that need a CUDA device, where this is a checkout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cacheblend_rag.bench.gpu.run import ROOT
from cacheblend_rag.bench.gpu.scene import Doing, Row, Scene

FOLDERS = ("tests/blend", "tests/prefill", "tests/engines/transformers")
"""Where tests on a device are; others need packages that a bare machine lacks."""
MARK = "torch.cuda.is_available()"
"""What files with such tests say."""
NAMED = "cuda or a_gpu"
TAIL = 1500


def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield a row for each folder: how pytest ended, and what it said last."""
    for folder in FOLDERS:
        doing(folder)
        files = [path for path in sorted((ROOT / folder).rglob("test_*.py")) if MARK in _text(path)]
        where = files or [ROOT / folder]  # with no path pytest would collect everything
        # Without the project's own options: they may name plugins that are not installed.
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=",
            "--no-header", "--continue-on-collection-errors", "-k", NAMED, *map(str, where),
        ]  # fmt: skip
        done = subprocess.run(  # noqa: S603 (the command is made here)
            command, cwd=ROOT, capture_output=True, text=True, check=False
        )
        lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-TAIL:]]
        row: Row = {"tests": folder, "exit": done.returncode, "said": lines[-1]}
        yield row if done.returncode == 0 else {**row, "output": done.stdout[-TAIL:]}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
