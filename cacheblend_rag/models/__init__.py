"""Names of models: packaged, a GGUF file, a folder or a hub name.

``resolve`` returns the folder or hub name that transformers and vLLM load, ``public_name`` the name
in reports and servers. ``packaged`` lists the models that a command fetches.
"""

from cacheblend_rag.models.names import (
    DEFAULT_MODEL,
    LOCAL_MODELS,
    absolute,
    check,
    is_local,
    public_name,
    resolve,
    tokenizer_source,
)

__all__ = [
    "DEFAULT_MODEL",
    "LOCAL_MODELS",
    "absolute",
    "check",
    "is_local",
    "public_name",
    "resolve",
    "tokenizer_source",
]
