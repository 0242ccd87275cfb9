"""Every command and program on the English guides runs, in a folder of its page's own.

The model smollm2 is stood in for by random weights of its depth with its tokenizer and template, so
that what is measured means nothing, and measurements are shortened. What cannot run here is marked
on the page, and read as the command line reads it.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from cacheblend_rag import Engine, Profile
from cacheblend_rag.bench import shapes
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.quality.questions import demo_dataset
from tests.cli.conftest import cli, no_lines_of_progress, one_thread  # noqa: F401 - fixtures
from tests.cli.test_bench import TINY
from tests.guides.pages import ENGLISH, PROGRAM, Block, blocks, inline_commands
from tests.guides.parsing import parse
from tests.readme import ROOT
from tests.servers import redis  # noqa: F401 - a fixture

MODEL = "smollm2"
logger = logging.getLogger("cacheblend_rag")
SHORTENED = {
    "index": f"--model {MODEL}",
    "ask": "--max-tokens 4",
    "eval": "--questions 1 --selectors question_mid --ratios 0.08 --max-tokens 2",
    "tune": "--questions 1 --selectors question_mid,hkvd --ratios 0.16 --least 0.01",
    "verify": "--dataset questions.json --questions 1",
    "explain": "--max-tokens 2",
    "analyze": f"--model {MODEL} --chunk-tokens 256 --overlap 8 --window 2 --max-tokens 2",
    "bench ttft": "--shape tiny --chunks 2 --chunk-tokens 32 --question-tokens 4 --repeat 1",
    "bench store": "--chunk-mib 1 --repeat 1",
    "bench batch": f"--model {MODEL} --requests 3 --chunks 4 --chunk-tokens 32 --repeat 1",
    "bench conversation": f"--model {MODEL} --turns 1 --passages 1 --passage-tokens 32",
}
"""Options that shorten a command; of an option that is given twice, the last one counts."""
MAY_FIND_FAULTS = {"doctor", "tune", "verify", "explain"}
"""Commands whose exit code 1 is an answer."""
NOT_RUN = {
    "needs vLLM": "tests/cli/test_on_vllm.py starts servers",
    "needs nginx and vLLM": "tests/examples/test_fleet.py runs the fleet",
    "needs Kubernetes": "tests/examples/test_production_stack.py checks the values",
}
"""Reasons for which blocks are not run here, and what tests them elsewhere."""
MARKED = [
    pytest.param(block, id=f"{name}: {block.reason}: {block.body.splitlines()[0]}")
    for name, page in ENGLISH.items()
    for block in blocks(page)
    if block.reason is not None
]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Path:
    """A folder with SmolLM2's tokenizer, template and depth, and small random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / MODEL
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(smollm2_folder)
    small = {"hidden_size": 36, "intermediate_size": 24, "head_dim": 4, "tie_word_embeddings": True}
    for name, value in small.items():
        setattr(config, name, value)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def reader(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stand_in: Path,
    redis,  # noqa: F811
) -> Iterator[Callable[[str], str]]:
    """Work in a folder with a report and questions; returns what replaces names."""
    texts = [passage.text for passage in load_passages().passages]
    (tmp_path / "report.txt").write_text("\n\n".join(texts[:6]))
    demo_dataset(("adjacent",), 2, 13).save(tmp_path / "questions.json")
    Profile(name="mine").save(tmp_path / "mine.toml")  # as `tune` writes one, if a blend is sooner
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "tiny": TINY})
    level = logger.level
    monkeypatch.chdir(tmp_path)

    def replaced(text: str) -> str:
        text = text.replace("redis://127.0.0.1:6379/0", f"redis://127.0.0.1:{redis.port}/0")
        return re.sub(rf'(?<=")({MODEL})(?=")|^{MODEL}$', str(stand_in), text)

    yield replaced
    logger.setLevel(level)


@pytest.mark.parametrize("name", ENGLISH)
def test_what_a_page_says_runs(
    name: str,
    reader: Callable[[str], str],
    cli,  # noqa: F811
) -> None:
    names: dict[str, object] = {}
    for block in blocks(ENGLISH[name]):
        if block.reason is not None:
            continue
        if block.language == "python":
            exec(reader(block.body), names)  # noqa: S102 - the page's own program
        elif block.language == "sh":
            for words in block.commands:
                _run(words, reader, cli)
    for value in names.values():
        if isinstance(value, Engine):
            value.close()


@pytest.mark.parametrize("block", MARKED)
def test_what_cannot_run_here_is_read(block: Block) -> None:
    assert block.reason in NOT_RUN
    _read(block)


@pytest.mark.parametrize("name", ENGLISH)
def test_commands_in_sentences_are_read(name: str) -> None:
    for words in inline_commands(ENGLISH[name]):
        parse(words[1:])


def _run(words: Sequence[str], reader: Callable[[str], str], cli) -> None:  # noqa: F811
    """Run one command in this process, shortened."""
    assert words[0] == PROGRAM, f"mark this block as not run here: {' '.join(words)}"
    name, given = parse(words[1:]), list(words[1:])
    if name != "index" or _is_new(given):
        given += SHORTENED.get(name, "").split()
    outcome = cli(*(reader(word) for word in given))
    faults = {0, 1} if name in MAY_FIND_FAULTS else {0}
    assert outcome.code in faults, f"{' '.join(given)}\n{outcome.stdout}\n{outcome.stderr}"


def _is_new(given: Sequence[str]) -> bool:
    """Whether `index` makes a collection; later runs use its own model."""
    folder = given[given.index("--into") + 1] if "--into" in given else ".cacheblend"
    return not Path(folder).exists()


def _read(block: Block) -> None:
    """Check a block that is not run: its commands, its imports, its files."""
    if block.language == "python":
        for node in ast.walk(ast.parse(block.body)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)
    if block.language != "sh":
        return
    for words in block.commands:
        if words[0] == PROGRAM:
            parse(words[1:])
        files = [word for word in words[1:] if word.startswith(("examples/", "docs/"))]
        assert [file for file in files if not (ROOT / file).exists()] == []
