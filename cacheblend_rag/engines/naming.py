"""How models are called in public."""

from __future__ import annotations

from pathlib import Path


def public_name(name: str) -> str:
    """Return a hub name as it is, and of a local folder only its own name."""
    path = Path(name)
    local = path.is_absolute() or path.exists() or name.startswith(".")
    return (path.resolve().name or name) if local else name
