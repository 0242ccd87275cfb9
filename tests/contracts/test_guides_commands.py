"""Every command and program on the English guides runs, in a folder of its page's own.

The model smollm2 is stood in for by random weights of its depth with its tokenizer and template, so
that what is measured means nothing, and measurements are shortened. What cannot run here is marked
on the page, and its commands and options are looked up in the command line's help.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from cacheblend_rag import Profile
from tests.contracts import page_runner
from tests.contracts.pages import ENGLISH, PROGRAM, Block, blocks, inline_commands
from tests.local_servers import Server, redis_server
from tests.models import words as words_of
from tests.readme import ROOT

MODEL = "smollm2"
SHORTENED = {
    "index": f"--model {MODEL}",
    "ask": "--set max_tokens=4",
    "eval": "--questions 1 --rules hkvd=0.15 --set max_tokens=2",
    "tune": "--questions 1 --rules question_mid=0.16 --bar fidelity=0.01",
    "verify": "--dataset questions.json",
    "ask --document": f"--set model={MODEL} --set chunk_tokens=256 "
    "--set overlap=8 --set window=2 --set max_tokens=2",
    "bench ttft": f"{MODEL} --chunks 2 --chunk-tokens 32 --repeat 1",
    "bench store": "--repeat 1",
}
"""Options that shorten a command; of an option that is given twice, the last one counts."""
MAY_FIND_FAULTS = {"doctor", "tune", "verify", "explain"}
"""Commands whose exit code 1 is an answer."""
VLLM_OPTIONS = {
    "--api-key", "--gpu-memory-utilization", "--kv-cache-dtype", "--max-model-len",
    "--tensor-parallel-size",
}  # fmt: skip
"""Options on the pages that `serve` passes to vLLM."""
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


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with redis_server() as server:
        yield server


@pytest.fixture
def reader(tmp_path: Path, stand_in: Path, redis: Server) -> Callable[[str], str]:
    """Put a report and questions into a folder; return what replaces names."""
    paragraphs = [words_of(120, seed) for seed in range(6)]
    (tmp_path / "report.txt").write_text("\n\n".join(paragraphs))
    asked = [
        {"question": "Who?", "answers": ["w9"], "ctxs": [{"title": "", "text": one}]}
        for one in paragraphs[:2]
    ]
    (tmp_path / "questions.json").write_text(json.dumps(asked))
    Profile(name="mine").save(tmp_path / "mine.toml")  # as `tune` writes one, if a blend is sooner

    def replaced(text: str) -> str:
        text = text.replace("redis://127.0.0.1:6379/0", f"redis://127.0.0.1:{redis.port}/0")
        return re.sub(rf'(?<=")({MODEL})(?=")|(?:^|(?<=model=)){MODEL}$', str(stand_in), text)

    return replaced


@pytest.mark.parametrize("name", ENGLISH)
def test_what_a_page_says_runs(name: str, reader: Callable[[str], str], tmp_path: Path) -> None:
    collections: set[str] = set()
    steps: list[list[object]] = []
    for block in blocks(ENGLISH[name]):
        if block.reason is None and block.language == "python":
            steps.append(["python", reader(block.body)])
        elif block.reason is None and block.language == "sh":
            steps += [_step(words, reader, collections) for words in block.commands]
    done = subprocess.run(
        [sys.executable, page_runner.__file__],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        input=json.dumps(steps),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("block", MARKED)
def test_what_cannot_run_here_is_read(block: Block) -> None:
    assert block.reason in NOT_RUN
    if block.language == "python":
        for node in ast.walk(ast.parse(block.body)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)
    if block.language != "sh":
        return
    for words in block.commands:
        if words[0] == PROGRAM:
            _check(words[1:])
        files = [word for word in words[1:] if word.startswith(("examples/", "docs/"))]
        assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("name", ENGLISH)
def test_commands_in_sentences_are_read(name: str) -> None:
    for words in inline_commands(ENGLISH[name]):
        _check(words[1:])


def _step(
    words: Sequence[str], reader: Callable[[str], str], collections: set[str]
) -> list[object]:
    """Return a command, shortened, and the exit codes that are right."""
    assert words[0] == PROGRAM, f"mark this block as not run here: {' '.join(words)}"
    given = list(words[1:])
    name = _name(given)
    into = given[given.index("--into") + 1] if "--into" in given else ".cacheblend"
    if name != "index" or into not in collections:  # later runs use the collection's own model
        given += SHORTENED.get(f"{name} --document" if "--document" in given else name, "").split()
    if name == "index":
        collections.add(into)
    codes = [0, 1] if name in MAY_FIND_FAULTS else [0]
    return ["sh", [reader(word) for word in given], codes]


def _name(words: Sequence[str]) -> str:
    """Return a command's name: two words of a group."""
    first, *rest = (word for word in words if word not in {"-v", "-vv", "--verbose"})
    is_group = "COMMAND [ARGS]" in _help(first)
    return f"{first} {rest[0]}" if is_group and rest else first


def _check(words: Sequence[str]) -> None:
    """Look a command and its options up in the help."""
    name = _name(words)
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", _help(*name.split())))
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    assert given - {"--verbose"} <= known | (VLLM_OPTIONS if name == "serve" else set()), name


@cache
def _help(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cacheblend_rag", *command, "--help"],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"no command {' '.join(command)!r}: {done.stderr}"
    return done.stdout
