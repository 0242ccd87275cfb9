"""What blending does on a GPU: ``python -m tests.benchmarks.gpu --out FILE --steps KIND``.

KIND: ``embedded`` times the embedded engine, ``exactness`` compares answers of vLLM, ``ttft`` and
``throughput`` time it. Each step measures one thing, in a process of its own and with a limit of
its own, less than nine minutes in all; the file is written anew after each. ``--toy`` tries
everything on a tiny shape, without a GPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError
from tests.benchmarks.gpu.requests import Scene
from tests.benchmarks.shapes import SHAPES, TOY
from tests.readme import ROOT

CHILD = "tests.benchmarks.gpu.child"
OUTPUT_CHARACTERS = 6000
TOTAL_SECONDS = 500.0
"""Limit of all steps together: nine minutes, less the program's own start on a new machine."""
TOY_FACTOR = 4.0
"""On a tiny shape a step may take so many times longer: CPUs that run tests are slow and busy."""


@dataclass(frozen=True)
class Step:
    """One step.

    measure: the generator that yields its rows, as ``module:function``. seconds: its limit, the
    start of its process included. needs_cuda: it is skipped without a CUDA device. arguments: of
    the generator, after shape and folder.
    """

    name: str
    about: str
    measure: str
    seconds: float
    needs_cuda: bool = False
    arguments: tuple[str, ...] = ()


OWN, ON_VLLM = "tests.benchmarks.gpu.steps", "tests.benchmarks.gpu.on_vllm"
FACTS = Step("facts", "the card, its driver, and versions", f"{OWN}:facts", 25)
EXACT_SECONDS = {"eager": 90, "graphs": 130, "chunked": 70, "fp8": 70, "float32": 60}
CALLS: Mapping[str, tuple[str, tuple[Step, ...]]] = {
    "embedded": (
        "llama-3.1-8b",
        (
            FACTS,
            Step("ttft", "first token of blends and ordinary prefill", f"{OWN}:ttft", 180),
            Step("tiers", "first token by where chunk KV is", f"{OWN}:tiers", 90),
            Step("memory", "peak memory beyond weights and store", f"{OWN}:memory", 80),
            Step("checks", "the tests that need a CUDA device", f"{OWN}:checks", 100, True),
        ),
    ),
    "exactness": (
        "llama-3.2-1b",
        (
            FACTS,
            Step("embedded", "answers of the embedded engine", f"{ON_VLLM}:embedded", 50),
            *(
                Step(name, "do answers agree?", f"{ON_VLLM}:exact", seconds, arguments=(name,))
                for name, seconds in EXACT_SECONDS.items()
            ),
        ),
    ),
    "ttft": (
        "llama-3.1-8b",
        (
            FACTS,
            Step("blends", "first token, prefix caching too", f"{ON_VLLM}:first_token", 300),
            Step("plain", "the same without connector", f"{ON_VLLM}:without_connector", 170),
        ),
    ),
    "throughput": (
        "llama-3.1-8b",
        (FACTS, Step("throughput", "questions a second", f"{ON_VLLM}:throughput", 470)),
    ),
}
"""The shape and the steps of each kind."""


def measure_gpu(out: Path, scene: Scene, steps: Sequence[Step]) -> dict[str, Any]:
    """Run the steps, one after another, and return what they found, as plain JSON values.

    Raises ConfigError without a CUDA device, unless everything is tiny; or if the file cannot be
    written.
    """
    if not (scene.has_cuda or scene.is_toy):
        raise ConfigError("no CUDA device: run it on a machine with a GPU, or try it with --toy")
    told = {"shape": scene.name, "device": scene.device.type, "dtype": str(scene.dtype)}
    found: dict[str, Any] = {**told, "steps": {}}
    _write(out, found)
    factor = TOY_FACTOR if scene.is_toy else 1.0
    until = time.monotonic() + factor * TOTAL_SECONDS
    with tempfile.TemporaryDirectory(prefix="cacheblend-gpu-") as folder:
        shared = replace(scene, folder=folder)
        for step in steps:
            print(step.name, file=sys.stderr)
            limit = min(factor * step.seconds, until - time.monotonic())
            found["steps"][step.name] = {"about": step.about, **_result(step, shared, limit)}
            _write(out, found)
    return found


def _write(out: Path, found: dict[str, Any]) -> None:
    """Replace the file at once, so that no reader sees half of it."""
    part = out.with_name(f"{out.name}.part")
    try:
        part.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
        os.replace(part, out)
    except OSError as error:
        raise ConfigError(
            f"out='{out}' cannot be written ({error.strerror}): give a file in a folder that exists"
        ) from error


def _result(step: Step, scene: Scene, limit: float) -> dict[str, Any]:
    """Run a step; returns its status, ``done``, ``failed``, ``late`` or ``skipped``, and rows."""
    reason = "no CUDA device" if step.needs_cuda and not scene.has_cuda else None
    reason = reason or ("no time left" if limit <= 0 else None)
    if reason:
        return {"status": "skipped", "reason": reason, "rows": []}
    with tempfile.TemporaryDirectory(prefix="cacheblend-gpu-") as folder:
        told, output = Path(folder, "rows.jsonl"), Path(folder, "output.txt")
        told.touch()
        command = [sys.executable, "-m", CHILD, str(told), scene.name, scene.folder, step.measure]
        command += step.arguments
        code = _exit_status(command, output, limit)
        rows = [json.loads(line) for line in told.read_text().splitlines()]
        said = output.read_text(errors="replace").strip()
    if code == 0:
        return {"status": "done", "reason": None, "rows": rows}
    last = said.splitlines()[-1] if said else "nothing said"
    status = "late" if code is None else "failed"
    reason = f"not done after {limit:.0f} s: {last}" if code is None else f"exit {code}: {last}"
    return {"status": status, "reason": reason, "rows": rows, "output": said[-OUTPUT_CHARACTERS:]}


def _exit_status(command: list[str], output: Path, limit: float) -> int | None:
    """Run a command; returns its exit status, None if it was stopped at the limit."""
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # what it has started ends with it, also after Ctrl-C
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(given: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets the result, after each step")
    parser.add_argument("--steps", default="embedded", choices=CALLS, help="what is measured")
    parser.add_argument("--shape", choices=SHAPES, help="the model's; each kind has its own")
    parser.add_argument("--step", action="append", help="of these only this one; repeatable")
    parser.add_argument("--toy", action="store_true", help="a tiny shape, without a GPU too")
    asked = parser.parse_args(given)
    shape, steps = CALLS[asked.steps]
    names = [step.name for step in steps]
    if unknown := set(asked.step or ()) - set(names):
        parser.error(f"--step {unknown.pop()}: --steps {asked.steps} has {', '.join(names)}")
    chosen = [step for step in steps if step.name in (asked.step or names)]
    scene = Scene(TOY.name if asked.toy else asked.shape or shape)
    try:
        found = measure_gpu(asked.out, scene, chosen)
    except ConfigError as error:
        sys.exit(str(error))
    for name, step in found["steps"].items():
        print(f"{name}: {step['reason'] or step['status']}")


if __name__ == "__main__":
    main()
