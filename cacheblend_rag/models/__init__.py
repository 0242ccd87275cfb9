"""Names of models: bundled, packaged, a GGUF file, a folder or a hub name.

``resolve`` returns the folder or hub name that transformers and vLLM load, ``public_name`` the name
in reports and servers. ``packaged`` lists the models that a command fetches.
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
