"""Steps that end in every way, for the tests of what runs them; they import nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any


def ends(shape: str, folder: str) -> Iterator[dict[str, Any]]:
    yield {"shape": shape, "nothing": float("nan"), "pairs": ((1, 2.5),)}


def fails(shape: str, folder: str) -> Iterator[dict[str, Any]]:
    yield {"case": 1}
    raise ValueError("no figure")


def crashes(shape: str, folder: str) -> Iterator[dict[str, Any]]:
    yield {"case": 1}
    os.write(1, b"a driver's last words")
    os._exit(9)


def hangs(shape: str, folder: str) -> Iterator[dict[str, Any]]:
    """Says the number of a process that it has started."""
    yield {"case": 1}
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    print(subprocess.Popen(sleep).pid, flush=True)
    time.sleep(600)
