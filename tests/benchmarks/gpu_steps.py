"""Steps that end in every way, for the tests of what runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.benchmarks.gpu.scene import Doing, Row, Scene


def ends(scene: Scene, doing: Doing) -> Iterator[Row]:
    doing("the only case")
    yield {"layers": scene.dimensions.layers, "nothing": float("nan"), "pairs": ((1, 2.5),)}


def fails(scene: Scene, doing: Doing) -> Iterator[Row]:
    yield {"case": 1}
    raise ValueError("no\nfigure")


def crashes(scene: Scene, doing: Doing) -> Iterator[Row]:
    doing("what crashes")
    yield {"case": 1}
    os.write(1, b"a driver's last words")
    os._exit(9)


def hangs(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Leaves the number of a process that it has started."""
    yield {"case": 1}
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    doing(str(subprocess.Popen(sleep).pid))
    time.sleep(600)
