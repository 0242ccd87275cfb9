"""`python -m tests.engines.vllm.one_family NAME`: try one family in vLLM, print a JSON line.

vLLM's process-wide state stands one family a process, and some take the process with them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from cacheblend_rag import BlendConfig
from tests.families.models import save_family

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def try_family(name: str, folder: Path) -> dict[str, Any]:
    """Return whether it is blended, and how far ratio 1 is from vLLM's own prefill."""
    from tests.engines.vllm.inprocess import InProcessEngine
    from tests.engines.vllm.test_exactness import DOCUMENTS, difference, retrieved

    engine = InProcessEngine.open(
        save_family(name, folder), BlendConfig(min_tokens=0, selector="hkvd")
    )
    found: dict[str, Any] = {"name": name, "refusal": engine.status.refusal or None}
    if engine.status.active:
        engine.precompute(DOCUMENTS, progress=False)
        prompt = retrieved()
        found |= {"everything": difference(engine, prompt, 1.0)}
        found |= {"nothing": difference(engine, prompt, 0.0)}
    return found


def main() -> None:
    """See the module; the process ends at once, whatever vLLM still has running."""
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = try_family(name, Path(folder) / "model")
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            found = {"name": name, "failed": f"{type(error).__name__}: {line}"[:160]}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
