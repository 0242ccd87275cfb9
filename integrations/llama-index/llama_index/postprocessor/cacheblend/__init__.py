import llama_index.llms.cacheblend  # noqa: F401  # first, since its query engine imports from here
from llama_index.postprocessor.cacheblend.postprocessor import CacheBlendPostprocessor

__all__ = ["CacheBlendPostprocessor"]
