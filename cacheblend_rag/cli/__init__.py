"""The command line ``cacheblend-rag``."""
