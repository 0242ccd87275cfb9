"""What decides on a GPU how much sooner blends are: ``python -m tests.benchmarks.gpu --out FILE``.

Each step measures one thing, in a process of its own and with a limit of its own, less than nine
minutes in all; the file is written anew after each. ``--toy`` tries everything on tiny shapes,
without a GPU too.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError
from tests.benchmarks.gpu.child import QUIETLY
from tests.benchmarks.gpu.scene import NO_CUDA, Dimensions, Scene
from tests.benchmarks.shapes import SHAPES, TOY
from tests.readme import ROOT

CHILD = "tests.benchmarks.gpu.child"
OUTPUT_CHARACTERS = 1500
FORMAT = 1
TOTAL_SECONDS = 500.0
"""Limit of all steps together: nine minutes, less the program's own start on a new machine."""
TOY_FACTOR = 4.0
"""On tiny shapes a step may take so many times longer: CPUs that run tests are slow and busy."""


@dataclass(frozen=True)
class Step:
    """One step.

    measure: the generator that yields its rows, as ``module:function``. seconds: its limit, the
    start of its process included. needs_cuda: it is skipped without a CUDA device. has_model:
    whether it runs a model.
    """

    name: str
    about: str
    measure: str
    seconds: float
    needs_cuda: bool = False
    has_model: bool = False


def _step(name: str, about: str, where: str, seconds: float, **traits: bool) -> Step:
    return Step(name, about, f"tests.benchmarks.gpu.{where}", seconds, **traits)


STEPS = (
    _step("facts", "the card, its driver, versions, what they support", "facts:measure", 25),
    _step(
        "link", "copies between host and device memory", "device:measure_link", 30, needs_cuda=True
    ),
    _step("products", "a layer's largest matrix product, by rows", "device:measure_products", 20),
    _step(
        "attention", "one layer's attention, by rows and keys, in new shapes",
        "attention:measure", 75,
    ),
    _step(
        "laying", "stored chunks into the buffer, keys re-rotated, per layer",
        "laying:measure", 30, has_model=True,
    ),
    _step("layer", "one driven layer on chosen rows", "layer:measure", 40, has_model=True),
    _step(
        "ttft", "time to first token of blends and ordinary prefill, chunks in memory",
        "first_token:measure_ttft", 95, has_model=True,
    ),
    _step(
        "tiers", "time to first token by where chunk KV is",
        "first_token:measure_tiers", 45, has_model=True,
    ),
    _step(
        "memory", "peak memory of a request beyond weights and store",
        "first_token:measure_memory", 40, has_model=True,
    ),
    _step(
        "graphs", "driven layers on few rows, without and with CUDA graphs",
        "graphs:measure", 50, needs_cuda=True, has_model=True,
    ),
    _step(
        "checks", "the project's tests that need a CUDA device", "facts:run_tests", 50,
        needs_cuda=True,
    ),
)  # fmt: skip


def measure_gpu(
    out: Path,
    scene: Scene,
    steps: Sequence[Step],
    advance: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the steps, one after another, and return what they found, as plain JSON values.

    Raises ConfigError without a CUDA device, unless everything is tiny; or if the file cannot be
    written.
    """
    if not (scene.has_cuda or scene.is_toy):
        raise ConfigError("no CUDA device: run it on a machine with a GPU, or try it with --toy")
    began = time.monotonic()
    found: dict[str, Any] = {
        "format": FORMAT,
        "toy": scene.is_toy,
        "shape": scene.dimensions.name,
        "device": scene.device.type,
        "dtype": str(scene.dtype).removeprefix("torch."),
        "seconds": 0.0,
        "steps": {},
    }
    _write(out, found)
    factor = TOY_FACTOR if scene.is_toy else 1.0
    until = began + factor * TOTAL_SECONDS
    for number, step in enumerate(steps, 1):
        advance(f"{number} of {len(steps)}, {step.name}")
        limit = min(factor * step.seconds, until - time.monotonic())
        found["steps"][step.name] = _result(step, scene, limit)
        found["seconds"] = round(time.monotonic() - began, 1)
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
    about = {"about": step.about, "limit_seconds": round(limit, 1)}
    reason = NO_CUDA if step.needs_cuda and not scene.has_cuda else None
    reason = reason or ("skipped: no time left" if limit <= 0 else None)
    if reason:
        return {"status": "skipped", "reason": reason, **about, "seconds": 0.0, "rows": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cacheblend-gpu-") as folder:
        told, output = Path(folder, "told.json"), Path(folder, "output.txt")
        code = _run(step, scene, told, output, limit)
        seen = _read(told)
        lines = output.read_text(errors="replace").strip()
    if code is None:
        status, reason = "late", f"not done after {limit:.0f} s, at: {seen['doing']}"
    elif code == 0 and seen["done"]:
        status, reason = "done", None
    else:
        status = "failed"
        reason = seen.get("failed") or f"exit status {code}, at: {seen['doing']}"
    result = {
        "status": status,
        "reason": reason,
        **about,
        "seconds": round(time.monotonic() - began, 1),
        "rows": seen["rows"],
    }
    return result if status == "done" else {**result, "output": lines[-OUTPUT_CHARACTERS:]}


def _run(step: Step, scene: Scene, told: Path, output: Path, limit: float) -> int | None:
    """Run a step's process; returns its exit status, None if it was stopped at the limit."""
    command = [sys.executable, "-m", CHILD, step.measure, json.dumps(scene.to_dict()), str(told)]
    command += [QUIETLY] if step.has_model else []
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    with output.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # what it has started ends with it, also after Ctrl-C
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _read(told: Path) -> dict[str, Any]:
    """Return what a step's process has told so far."""
    try:
        found: dict[str, Any] = json.loads(told.read_text())
    except OSError:
        found = {"doing": "starting", "rows": [], "done": False}
    return found


def main(given: Sequence[str] | None = None) -> None:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets the result, after each step")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--step", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, without a GPU too")
    parser.add_argument("--json", action="store_true", help="print the result, too")
    asked = parser.parse_args(given)
    scene = Scene(asked.toy, Dimensions.of(TOY if asked.toy else SHAPES[asked.shape]))
    chosen = [step for step in STEPS if step.name in (asked.step or names)]
    try:
        found = measure_gpu(asked.out, scene, chosen, lambda label: print(label, file=sys.stderr))
    except ConfigError as error:
        sys.exit(str(error))
    if asked.json:
        print(json.dumps(found, allow_nan=False))
    else:
        for name, step in found["steps"].items():
            print(f"{name}: {step['reason'] or step['status']} ({step['seconds']:.1f} s)")


if __name__ == "__main__":
    main()
