"""An OpenAI-compatible server over any engine, and HTTP routes for documents on vLLM's too."""
