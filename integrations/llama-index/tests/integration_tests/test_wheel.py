"""The wheel holds what it should, and imports beside llama-index-core from a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # noqa: S603
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_no_file_of_the_namespaces_and_imports_beside_the_core(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(PROJECT / "llama_index", source / "llama_index")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PROJECT / name, source)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("llms", "postprocessor"):
        assert f"llama_index/{package}/cacheblend/py.typed" in names
        assert f"llama_index/{package}/__init__.py" not in names
    assert "llama_index/__init__.py" not in names
    assert not any(name.startswith("tests/") for name in names)
    run(*PIP, "install", "--no-deps", "--target", str(target), str(wheel))
    told = run(sys.executable, "-c", TRY, str(target), cwd=tmp_path)
    assert told.split() == ["CacheBlendLLM", "CacheBlendPostprocessor"]
