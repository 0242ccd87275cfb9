"""CacheBlend in vLLM: the connector that runs inside it, and engines that talk to it."""
