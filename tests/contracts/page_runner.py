"""Run a page's commands and programs in turn in this process: ``python page_runner.py < STEPS``.

Steps are JSON: ``["python", a program]``, whose names the next one has, too, or ``["sh", words,
codes]``, a command of ours with the exit codes that are right.
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any


def main(steps: list[list[Any]]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for kind, body, *codes in steps:
        told = body if kind == "python" else " ".join(["cacheblend-rag", *body])
        sys.stderr.write(f"== {told}\n")
        if kind == "python":
            exec(compile(body, "page", "exec"), names)  # noqa: S102 - the page's own program
        elif (code := _exit_code(body)) not in codes[0]:
            sys.exit(f"exit code {code}: {told}")


def _exit_code(words: list[str]) -> int | str:
    sys.argv = ["cacheblend-rag", *words]
    try:
        runpy.run_module("cacheblend_rag", run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0
    return 0


if __name__ == "__main__":
    main(json.load(sys.stdin))
