"""`python -m tests.benchmarks.start`: from a command to its first token, and of the import.

Each measurement is a process of its own, whose wall and processor time (user and system) count.
With ``--against DIR``, the root of another checkout, each is measured in both, one after the other,
in turn, so that other work on the machine meets both alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import cacheblend_rag
from cacheblend_rag.bench.interleave import Advance
from cacheblend_rag.bench.plan import Plan, option
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.errors import ConfigError
from tests.benchmarks.command import benchmark_app

HERE, OTHER = "here", "against"
COMMAND = ("-m", "cacheblend_rag")
MODELS: Mapping[str, tuple[str, str]] = {
    "toy": ("--save", "What is the sport of Ivan Novak?"),
    "smollm2": ("--save-passages", "Which goddess protects Hapi?"),
}
"""The models to ask, with `demo`'s option that saves texts for each, and a question about them."""

TEXTS = 10
"""How many of the texts are indexed, in the order of their names; they hold the answers."""

Timed = tuple[float, float]
"""Seconds, and processor seconds."""


@dataclass(frozen=True, kw_only=True)
class StartPlan(Plan):
    """Seconds of the import, and of `ask` from its start to the answer's first token."""

    against: Path | None = option(None, "The root of another checkout, measured in turn.")
    model: tuple[str, ...] = option(tuple(MODELS), "demo or smollm2; several times for several.")
    repeat: int = option(10, "Imports, and commands of each model.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.model:
            if name not in MODELS:
                raise ConfigError(f"model={name!r} must be {' or '.join(MODELS)}")
        if self.against is not None and not (self.against / "cacheblend_rag").is_dir():
            raise ConfigError(f"against={str(self.against)!r} must be the root of a checkout")


def measure_start(plan: StartPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return the medians of each measurement, and the ratios of the other checkout's to ours."""
    roots = {HERE: Path(cacheblend_rag.__file__).parents[1]}
    if plan.against is not None:
        roots[OTHER] = plan.against.resolve()
    found: dict[str, Any] = {"repeat": plan.repeat}
    with TemporaryDirectory() as folder:
        found |= _compared(plan, roots, "import", _imported, advance)
        for name in plan.model:
            collections = {}
            for kind, root in roots.items():
                advance(f"indexing for {name}")
                collections[kind] = _indexed(root, name, Path(folder) / kind / name)

            def ask(kind: str, root: Path, name: str = name, at: Any = collections) -> Timed:
                return _asked(root, at[kind], MODELS[name][1])

            found |= _compared(plan, roots, name, ask, advance)
    return found


def _compared(
    plan: StartPlan,
    roots: Mapping[str, Path],
    what: str,
    measure: Callable[[str, Path], Timed],
    advance: Advance,
) -> dict[str, Any]:
    runs: dict[str, list[Timed]] = {kind: [] for kind in roots}
    for turn in range(plan.repeat + 1):  # the first, which writes bytecode, does not count
        for kind, root in roots.items():
            advance(f"{what}, {turn} of {plan.repeat}")
            timed = measure(kind, root)
            if turn:
                runs[kind].append(timed)
    told: dict[str, Any] = {}
    for index, unit in enumerate(("seconds", "processor seconds")):
        for kind, times in runs.items():
            told[f"{what} {kind} {unit}"] = median(one[index] for one in times)
        if OTHER in runs:
            pairs = zip(runs[OTHER], runs[HERE], strict=True)
            told[f"{what} {unit} over ours"] = median(a[index] / b[index] for a, b in pairs)
    return told


def _imported(_: str, root: Path) -> Timed:
    before, began = _processor_seconds(), time.perf_counter()
    _run(root, "-c", "import cacheblend_rag")
    return time.perf_counter() - began, _processor_seconds() - before


def _indexed(root: Path, model: str, folder: Path) -> Path:
    """Return a collection of the texts that `demo` saves for a model."""
    folder.mkdir(parents=True)
    _run(root, *COMMAND, "toy", MODELS[model][0], str(folder / "texts"))
    collection = folder / "collection"
    texts = sorted((folder / "texts").glob("*.txt"))[:TEXTS]
    command = ("index", *map(str, texts), "--model", model, "--into", str(collection))
    _run(root, *COMMAND, *command)
    return collection


def _asked(root: Path, collection: Path, question: str) -> Timed:
    """Ask a question; the process is ended as soon as it has written some of the answer."""
    command = [sys.executable, *COMMAND, "ask", question, "--from", str(collection)]
    before, began = _processor_seconds(), time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=_environment(root),
        cwd=collection,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.kill()
    if not first:
        raise ConfigError(f"`ask` in {root} wrote no answer: run it there to see why")
    return seconds, _processor_seconds() - before


def _run(root: Path, *arguments: str) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=_environment(root), cwd=root, check=False
    )
    if done.returncode:
        raise ConfigError(f"{' '.join(arguments)} failed in {root}: {done.stderr.strip()[-500:]}")


def _environment(root: Path) -> dict[str, str]:
    """Return an environment that imports a checkout and, as one installed, keeps its bytecode."""
    inherited = dict(os.environ)
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**inherited, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}


def _processor_seconds() -> float:
    """Return user and system time of all processes that this one has waited for."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


app = benchmark_app(StartPlan, measure_start, facts("start"))

if __name__ == "__main__":
    app()
