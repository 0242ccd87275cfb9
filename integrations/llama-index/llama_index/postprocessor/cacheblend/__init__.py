from llama_index.postprocessor.cacheblend.postprocessor import CacheBlendPostprocessor

__all__ = ["CacheBlendPostprocessor"]
