"""A small model that ships with the package, the text it reads and the program that trained it."""

from pathlib import Path

MODEL_FOLDER = Path(__file__).parent / "model"
"""The bundled model, a folder in hub format."""
