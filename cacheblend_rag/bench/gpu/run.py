"""Runs the steps of ``bench gpu``, and writes the result anew after each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cacheblend_rag.bench.gpu.child import QUIETLY
from cacheblend_rag.bench.gpu.steps import STEPS, TOTAL_SECONDS, TOY_FACTOR, Step
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.bench.gpu.scene import Scene
    from cacheblend_rag.bench.plans import GpuPlan

Advance = Callable[[str], None]
ROOT = Path(__file__).parents[3]
"""The folder that this package is imported from: of a checkout, or of installed packages."""
CHILD = "cacheblend_rag.bench.gpu.child"
POLL_SECONDS = 0.1
OUTPUT_CHARACTERS = 1500
FORMAT = 1


def measure_gpu(
    plan: GpuPlan, advance: Advance = lambda _: None, steps: Sequence[Step] = STEPS
) -> dict[str, Any]:
    """Run the steps, one after another, and return what they found, as plain JSON values.

    Args:
        plan: what to measure, and the file to write.
        advance: called with a label before each case, for a progress display.
        steps: those to choose from.

    Raises:
        ConfigError: without a CUDA device, unless everything is tiny; or if the file cannot be
            written.
    """
    scene = plan.scene()
    if not (scene.has_cuda or plan.toy):
        raise ConfigError(
            "no CUDA device: run `bench gpu` on a machine with a GPU, or try it with --toy"
        )
    began = time.monotonic()
    found: dict[str, Any] = {
        "format": FORMAT,
        "toy": plan.toy,
        "shape": scene.dimensions.name,
        "device": scene.device.type,
        "dtype": str(scene.dtype).removeprefix("torch."),
        "seconds": 0.0,
        "steps": {},
    }
    chosen = [step for step in steps if step.name in plan.steps or not plan.steps]
    _write(Path(plan.out), found)
    factor = TOY_FACTOR if plan.toy else 1.0
    until = began + factor * TOTAL_SECONDS
    for number, step in enumerate(chosen, 1):
        label = f"{number} of {len(chosen)}, {step.name}"
        limit = min(factor * step.seconds, until - time.monotonic())
        found["steps"][step.name] = _result(step, scene, limit, partial(_labelled, advance, label))
        found["seconds"] = round(time.monotonic() - began, 1)
        _write(Path(plan.out), found)
    return found


def _labelled(advance: Advance, label: str, doing: str) -> None:
    advance(f"{label}: {doing}")


def checkout() -> Path | None:
    """Return the checkout that this package is imported from; None if it is installed."""
    is_checkout = (ROOT / "pyproject.toml").is_file() and (ROOT / "tests").is_dir()
    return ROOT if is_checkout else None


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


def _result(step: Step, scene: Scene, limit: float, advance: Advance) -> dict[str, Any]:
    """Run a step; returns its status, ``done``, ``failed``, ``late`` or ``skipped``, and rows."""
    about = {"about": step.about, "limit_seconds": round(limit, 1)}
    reason = _skips(step, scene, limit)
    if reason:
        return {"status": "skipped", "reason": reason, **about, "seconds": 0.0, "rows": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cacheblend-gpu-") as folder:
        told, output = Path(folder, "told.json"), Path(folder, "output.txt")
        with output.open("wb") as log:
            code = _run(_command(step, scene, told), log, told, limit, advance)
        seen = _read(told)
        lines = output.read_text(errors="replace").strip()
    status, reason = _status(code, seen, limit)
    result = {
        "status": status,
        "reason": reason,
        **about,
        "seconds": round(time.monotonic() - began, 1),
        "rows": seen["rows"],
    }
    return result if status == "done" else {**result, "output": lines[-OUTPUT_CHARACTERS:]}


def _skips(step: Step, scene: Scene, limit: float) -> str | None:
    """Return why a step is not run, or None."""
    if step.needs_cuda and not scene.has_cuda:
        return "skipped: no CUDA device"
    if step.needs_checkout and checkout() is None:
        return "skipped: not run from a checkout"
    return "skipped: no time left" if limit <= 0 else None


def _status(code: int | None, seen: dict[str, Any], limit: float) -> tuple[str, str | None]:
    if code is None:
        return "late", f"not done after {limit:.0f} s, at: {seen['doing']}"
    if code == 0 and seen["done"]:
        return "done", None
    return "failed", seen.get("failed") or f"exit status {code}, at: {seen['doing']}"


def _command(step: Step, scene: Scene, told: Path) -> list[str]:
    command = [sys.executable, "-m", CHILD, step.measure, json.dumps(scene.to_dict()), str(told)]
    return [*command, QUIETLY] if step.has_model else command


def _run(
    command: list[str], log: IO[bytes], told: Path, limit: float, advance: Advance
) -> int | None:
    """Run a step's process; returns its exit status, None if it was stopped at the limit."""
    until = time.monotonic() + limit
    process = subprocess.Popen(  # noqa: S603 (the command is made here)
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=_environment(),
        start_new_session=True,
    )
    try:
        while time.monotonic() < until:
            advance(_read(told)["doing"])
            with suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_SECONDS)
        return None
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still running, and those it has started; also after Ctrl-C."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of a step: from a checkout, its modules are found there."""
    if checkout() is None:
        return dict(os.environ)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _read(told: Path) -> dict[str, Any]:
    """Return what a step's process has told so far."""
    try:
        found: dict[str, Any] = json.loads(told.read_text())
    except OSError:
        found = {"doing": "starting", "rows": [], "done": False}
    return found
