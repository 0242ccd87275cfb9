"""A newcomer follows the README: its commands and programs run as they stand, one after another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import BIN, README, blocks, commands

REUSED = re.compile(r"([\d,]+) of ([\d,]+) tokens reused")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the demo's notes, as the README's first command makes them."""
    folder = tmp_path_factory.mktemp("newcomer")
    (save,) = [words for words in commands(".venv/bin/cacheblend-rag") if words[1] == "demo"]
    run([str(BIN / "cacheblend-rag"), *save[1:]], folder)
    return folder


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "nothing was reused" not in done.stderr
    return done.stdout


def test_the_first_commands_answer_from_an_index(folder: Path) -> None:
    said = {
        words[1]: run([str(BIN / "cacheblend-rag"), *words[1:]], folder)
        for words in commands(".venv/bin/cacheblend-rag")
        if words[1] in {"index", "ask"}
    }
    assert "24 documents" in said["index"]
    assert said["ask"].startswith("cycling")
    assert "passages: 4 reused" in said["ask"]


@pytest.mark.parametrize("language", ["python", "diff"])
def test_programs_run_as_they_stand_and_reuse_passages(folder: Path, language: str) -> None:
    programs = [block for block in blocks(language) if "http://" not in block]
    assert len(programs) == {"python": 1, "diff": 2}[language]
    for program in programs:
        out = run([sys.executable, "-c", program], folder)
        assert "cycling" in out, program
        for reused, tokens in REUSED.findall(out):
            assert int(reused) > int(tokens) / 2


def test_what_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (README.parent / link).exists()] == []
