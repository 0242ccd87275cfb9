"""The embedded engine: Hugging Face transformers in process, on CPU or GPU."""

from cacheblend_rag.engines.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine"]
