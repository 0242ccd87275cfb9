"""A small model that ships with the package, the text it reads and the program that trained it."""

from cacheblend_rag.models import DEMO_FOLDER as MODEL_FOLDER

__all__ = ["MODEL_FOLDER"]
