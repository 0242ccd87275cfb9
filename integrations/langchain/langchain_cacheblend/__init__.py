"""langchain-cacheblend: answer RAG questions in LangChain from passages' stored KV caches."""

from langchain_cacheblend.chains import DEFAULT_PROMPT, create_cacheblend_chain
from langchain_cacheblend.chat_models import ChatCacheBlend
from langchain_cacheblend.documents import (
    CacheBlendCompressor,
    CacheBlendTransformer,
    retrieval_hints,
)
from langchain_cacheblend.history import CacheBlendChatMessageHistory

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_PROMPT",
    "CacheBlendChatMessageHistory",
    "CacheBlendCompressor",
    "CacheBlendTransformer",
    "ChatCacheBlend",
    "create_cacheblend_chain",
    "retrieval_hints",
]
