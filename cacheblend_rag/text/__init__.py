"""Chunks, registries that find them in a text, prompts as segments, and their tokens."""
