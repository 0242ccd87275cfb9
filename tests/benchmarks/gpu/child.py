"""Runs one step in a process of its own: ``python -m tests.benchmarks.gpu.child``.

Arguments: the step's ``module:function``, the scene as JSON, the file for the result, and QUIETLY
if transformers is to be imported first. The file is replaced before and after each case, so that a
process that is killed leaves what it has measured.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from cacheblend_rag.engines.model_files import quiet_libraries
from tests.benchmarks.gpu.scene import Scene

QUIETLY = "quietly"


class Told:
    """The JSON file in which a step's process reports progress and results to its parent."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_suffix(".part")
        self._told: dict[str, Any] = {"doing": "starting", "rows": [], "done": False}

    def doing(self, label: str) -> None:
        """Tell which case is measured next."""
        self._write(doing=label)

    def row(self, row: dict[str, Any]) -> None:
        """Add a measured case."""
        self._write(rows=[*self._told["rows"], plain(row)])

    def end(self, failed: str | None = None) -> None:
        """Tell that the step is over, or why it failed."""
        self._write(done=failed is None, failed=failed)

    def _write(self, **changes: Any) -> None:
        self._told |= changes
        self._part.write_text(json.dumps(self._told))
        os.replace(self._part, self._path)


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: NaN and infinity become text."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def main(measure: str, scene: str, path: str, how: str = "") -> int:
    """Run a step; returns the exit status.

    Args:
        measure: the generator of the step's rows, as ``module:function``.
        scene: what it measures on, as JSON.
        path: the file for the result.
        how: QUIETLY imports transformers first, and faster.
    """
    told = Told(Path(path))
    told.doing("importing")
    try:
        if how == QUIETLY:
            quiet_libraries()
        module, name = measure.split(":")
        rows = getattr(import_module(module), name)(Scene.of(json.loads(scene)), told.doing)
        for row in rows:
            told.row(row)
    except Exception as error:  # told in the result; the other steps go on
        traceback.print_exc()
        told.end(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
        return 1
    told.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
