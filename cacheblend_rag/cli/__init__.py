"""The command ``cacheblend-rag``."""
