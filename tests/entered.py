"""Counts the files of the package that a request enters: ``python -m tests.entered [--vllm]``.

One index run of a document and one answer over it on the embedded engine; with ``--vllm`` the same
in vLLM, in this process. A file is entered when one of its functions is called.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = f"{os.sep}cacheblend_rag{os.sep}"
_files: set[str] = set()


def _note(frame: FrameType, event: str, _: Any, files: set[str] = _files) -> None:
    if event == "call":
        files.add(frame.f_code.co_filename)


def main() -> None:
    """Print how many files are entered, and with ``--files`` which."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--vllm", action="store_true", help="in vLLM")
    parser.add_argument("--files", action="store_true", help="print the files, too")
    options = parser.parse_args()
    threading.setprofile(_note)  # threads that begin from here on
    sys.setprofile(_note)
    with tempfile.TemporaryDirectory() as folder:
        found = _found(options.vllm, Path(folder))
    sys.setprofile(None)
    told: dict[str, Any] = {name: sorted(files) for name, files in found.items()}
    counts = {name: len(files) for name, files in told.items()}
    sys.stdout.write(json.dumps(told if options.files else counts) + "\n")


def _found(in_vllm: bool, folder: Path) -> dict[str, set[str]]:
    from cacheblend_rag import BlendConfig, Document, SamplingParams, TransformersEngine
    from tests.models import make_model, make_tokenizer, save_model, words

    config = BlendConfig(min_tokens=0, cost_model=False)
    if in_vllm:
        from tests.engines.vllm.inprocess import InProcessEngine

        save_model("llama", folder, head_dim=32)
        make_tokenizer().save_pretrained(folder)
        engine: Any = InProcessEngine.open(folder, config)
    else:
        engine = TransformersEngine(make_model("llama"), tokenizer=make_tokenizer(), config=config)
    document = Document("one", tuple(words(64, seed) for seed in range(3)))
    prompt = " ".join((*document.chunks, words(9, 7)))
    found = {}
    works = {
        "index": lambda: engine.precompute([document], progress=False),
        "generate": lambda: engine.generate(prompt, SamplingParams(max_tokens=4)),
    }
    for name, work in works.items():
        _files.clear()
        work()
        found[name] = {file for file in _files if PACKAGE in file}
    engine.close()
    return found


if __name__ == "__main__":
    main()
