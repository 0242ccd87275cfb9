from llama_index.llms.cacheblend.chat_engine import CacheBlendChatMemory, cacheblend_chat_engine
from llama_index.llms.cacheblend.context import CacheBlendReportEvent, collect_reports
from llama_index.llms.cacheblend.indexing import CacheBlendPrecompute, CacheBlendVectorStore
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.prompt_helper import CacheBlendPromptHelper
from llama_index.llms.cacheblend.query_engine import (
    cacheblend_query_engine,
    cacheblend_retriever_tool,
)

__all__ = [
    "CacheBlendChatMemory",
    "CacheBlendLLM",
    "CacheBlendPrecompute",
    "CacheBlendPromptHelper",
    "CacheBlendReportEvent",
    "CacheBlendVectorStore",
    "cacheblend_chat_engine",
    "cacheblend_query_engine",
    "cacheblend_retriever_tool",
    "collect_reports",
]
