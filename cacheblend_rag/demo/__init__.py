"""The bundled toy model and its corpus, and a sample of real passages."""

from cacheblend_rag.models import DEMO_FOLDER as MODEL_FOLDER

__all__ = ["MODEL_FOLDER"]
