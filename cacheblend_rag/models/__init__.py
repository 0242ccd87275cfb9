"""What a model's name stands for: bundled, packaged, a GGUF file, a folder or a hub name.

``resolve`` turns any of them into what transformers and vLLM load, ``public_name`` into what
reports and servers call the model. ``packaged`` lists the models that a command fetches.
"""

from cacheblend_rag.models.names import (
    DEFAULT_MODEL,
    DEMO_FOLDER,
    DEMO_MODEL,
    LOCAL_MODELS,
    absolute,
    check,
    is_local,
    knows_only_the_demo,
    public_name,
    resolve,
    tokenizer_source,
)

__all__ = [
    "DEFAULT_MODEL",
    "DEMO_FOLDER",
    "DEMO_MODEL",
    "LOCAL_MODELS",
    "absolute",
    "check",
    "is_local",
    "knows_only_the_demo",
    "public_name",
    "resolve",
    "tokenizer_source",
]
