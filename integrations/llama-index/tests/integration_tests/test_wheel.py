"""The wheel holds what it should, and imports beside llama-index-core from a folder of its own."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
TRY = """
import sys
sys.path.insert(0, sys.argv[1])
import llama_index.core
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor
from llama_index.llms.cacheblend import CacheBlendLLM
import llama_index.llms.cacheblend as package
assert package.__file__.startswith(sys.argv[1]), package.__file__
print(CacheBlendLLM(model="smollm2").class_name(), CacheBlendPostprocessor.class_name())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    copied = ["pyproject.toml", "README.md", "llama_index"]
    source.mkdir()
    subprocess.run(["cp", "-r", *(str(PROJECT / name) for name in copied), source], check=True)  # noqa: S603, S607
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True)  # noqa: S603
    (built,) = folder.glob("*.whl")
    return built


def test_it_holds_the_packages_and_no_file_of_the_namespaces(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("llms", "postprocessor"):
        assert f"llama_index/{package}/cacheblend/py.typed" in names
        assert f"llama_index/{package}/__init__.py" not in names
    assert "llama_index/__init__.py" not in names
    assert not any(name.startswith("tests/") for name in names)


def test_it_imports_beside_the_core(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)  # noqa: S603
    tried = subprocess.run(  # noqa: S603
        [sys.executable, "-c", TRY, str(target)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert tried.returncode == 0, tried.stderr
    assert tried.stdout.split() == ["CacheBlendLLM", "CacheBlendPostprocessor"]
