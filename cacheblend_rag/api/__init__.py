"""An OpenAI-compatible server over any engine, for a laptop: ``create_app`` (see ``app``)."""
