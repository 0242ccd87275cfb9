"""The process of a step: ``python -m tests.benchmarks.gpu.child FILE SHAPE FOLDER MEASURE ...``.

MEASURE is the generator of the step's rows, as ``module:function``, which takes SHAPE, FOLDER, and
what follows. FOLDER is for what steps share. Each row is added to FILE as a line of JSON, so that a
process that is killed leaves what it has measured.
"""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: NaN and infinity become text."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def main(file: str, shape: str, folder: str, measure: str, *arguments: str) -> None:
    """Write the rows of a step."""
    module, name = measure.split(":")
    with Path(file).open("w") as told:
        for row in getattr(import_module(module), name)(shape, folder, *arguments):
            print(json.dumps(plain(row)), file=told, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
