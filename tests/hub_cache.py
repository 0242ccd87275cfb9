"""A hub's cache filled from folders here, so that programs find models by hub names, offline."""

from __future__ import annotations

from pathlib import Path

REVISION = "0" * 40


def fill(home: Path, models: dict[str, Path]) -> dict[str, str]:
    """Lay models out under HF_HOME as the hub's client does; return the environment to run in.

    models: folders in hub format, by hub name.
    """
    for name, source in models.items():
        cached = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = cached / "snapshots" / REVISION
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(source.resolve(), target_is_directory=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(REVISION)
    hub = str(home / "hub")
    # LlamaIndex looks for embedding models in a cache of its own, laid out in the same way.
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "LLAMA_INDEX_CACHE_DIR": hub}
