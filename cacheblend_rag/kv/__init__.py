"""Chunk KV and where it lives: codec, tiers, store."""
