"""Reads a command as the command line does, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.main import get_command

from cacheblend_rag.cli.main import app

VLLM_OPTIONS = {
    "--api-key", "--gpu-memory-utilization", "--kv-cache-dtype", "--max-model-len",
    "--tensor-parallel-size",
}  # fmt: skip
"""Options on the pages that `serve` passes to vLLM."""


def parse(words: Sequence[str]) -> str:
    """Read the words after ``cacheblend-rag``; returns the command's name.

    Raises AssertionError, or Click's error, for a command or an option that there is not.
    """
    command: Any = get_command(app)
    left, name = list(words), list[str]()
    while left[0].startswith("-"):  # such as -vv, of all commands
        assert left.pop(0) in {"-v", "-vv", "--verbose"}
    while left and hasattr(command, "commands"):
        assert left[0] in command.commands, f"no command {' '.join([*name, left[0]])!r}"
        name.append(left[0])
        command = command.commands[left.pop(0)]
    if not left:  # a command that is only named
        return " ".join(name)
    context = command.make_context(" ".join(name), left)
    unknown = {word for word in context.args if word.startswith("--")}
    assert unknown <= VLLM_OPTIONS, f"options that nobody knows: {unknown - VLLM_OPTIONS}"
    return " ".join(name)
