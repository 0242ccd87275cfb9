"""The distribution builds, and works from a folder of its own beside langchain-core."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from toy import TOY

DISTRIBUTION = Path(__file__).parents[2]
PROGRAM = """
import sys

import langchain_cacheblend
from langchain_cacheblend.middleware import CacheBlendMiddleware
llm = langchain_cacheblend.ChatCacheBlend(model=sys.argv[1], max_tokens=1)
print(langchain_cacheblend.__file__)
print(llm.invoke("Hello").usage_metadata["output_tokens"])
"""


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_installs_and_answers(tmp_path: Path) -> None:
    source, wheels, target = tmp_path / "source", tmp_path / "wheels", tmp_path / "target"
    source.mkdir()
    shutil.copytree(DISTRIBUTION / "langchain_cacheblend", source / "langchain_cacheblend")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(DISTRIBUTION / name, source)
    pip = (sys.executable, "-m", "pip", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
    (wheel,) = wheels.glob("langchain_cacheblend-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "langchain_cacheblend/py.typed" in names
    assert not any(name.startswith("tests") for name in names)
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel))

    root = str(Path(__import__("cacheblend_rag").__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(target), root))}
    file, tokens = run(sys.executable, "-c", PROGRAM, TOY, cwd=tmp_path, env=env).split()
    assert Path(file).is_relative_to(target)
    assert tokens == "1"
