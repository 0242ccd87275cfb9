"""HTTP routes over an engine, for vLLM's server and for the embedded engine's own."""
