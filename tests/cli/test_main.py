from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import version

import pytest


def test_version(cli):
    outcome = cli("--version")
    assert (outcome.code, outcome.stdout) == (0, f"{version('cacheblend-rag')}\n")


HEAVY = ("torch", "transformers", "tokenizers", "numpy", "jinja2", "faiss", "sklearn")


def imported(program: str, *arguments: str) -> list[str]:
    """Run a program in a new process; returns those of HEAVY that it has imported at its end."""
    code = (
        "import atexit, os, sys\n"
        "told = os.fdopen(os.dup(1), 'w')\n"
        "os.dup2(2, 1)\n"
        f"heavy = {HEAVY}\n"
        "atexit.register(lambda: print(*set(heavy) & set(sys.modules), file=told, flush=True))\n"
        f"{program}"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


def test_the_package_is_imported_without_other_heavy_ones():
    assert imported("import cacheblend_rag") == []
    assert imported("import cacheblend_rag; cacheblend_rag.ChunkRegistry") == ["numpy"]


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("serve", "--help"), ("bench", "--help")],
    ids=" ".join,
)
def test_help_loads_no_model_library(arguments):
    assert imported("from cacheblend_rag.cli.main import app; app()", *arguments) == []


def test_a_command_imports_no_other_one():
    code = "import sys; from cacheblend_rag.cli.main import app; app(standalone_mode=False)"
    code += "; assert 'cacheblend_rag.cli.ask' in sys.modules"
    code += "; assert 'cacheblend_rag.cli.bench' not in sys.modules"
    assert imported(code, "ask", "--help") == []


def test_verbose_raises_the_log_level(cli):
    logger = logging.getLogger("cacheblend_rag")
    before = logger.level
    try:
        cli("-vv", "store", "stats", "/nowhere")
        assert logger.level == logging.DEBUG
        cli("store", "stats", "/nowhere")
        assert logger.level == logging.WARNING
    finally:
        logger.setLevel(before)
