"""ASGI middleware that a vLLM server runs in front of its own application."""
