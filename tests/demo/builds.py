"""Folders of the toys beside the bundled one, made by the same program."""

from __future__ import annotations

from pathlib import Path

from tests.demo.architectures import ARCHITECTURES, DEFAULT_ARCHITECTURE

FOLDER = Path(__file__).parents[1] / "models"
BUILDS = {name: FOLDER / name for name in ARCHITECTURES if name != DEFAULT_ARCHITECTURE}
