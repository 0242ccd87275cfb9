"""The names that contracts use: what stays public, whatever becomes of the code behind it."""

PACKAGE = frozenset(
    {
        # Engines, what they take and what they tell.
        "Engine", "TransformersEngine", "open_engine", "BlendPrompt", "ChatPrompt", "Chunk",
        "Document", "SamplingParams", "StructuredOutputs", "ToolCall", "Delta", "Generation",
        "TokenLogprob", "BlendReport", "ChunkReport", "FillReport", "GuardReport",
        "PrecomputeReport", "Reason", "ReasonCode",
        # Settings.
        "BlendConfig", "GuardConfig", "LeadInConfig", "Profile", "StoreConfig",
        # Around an engine.
        "Conversation", "EngineMetrics", "Explanation", "analyze_long_document", "diagnose",
        "trace_requests", "tune_model", "verify_model",
        # Errors.
        "CacheBlendError", "ConfigError", "DamagedChunkError", "DatasetError",
        "EngineUnavailableError", "ForeignChunkError", "MissingExtraError", "ModelLoadError",
        "OutOfMemoryError", "PromptError", "StoreError", "UnsupportedModelError",
    }
)  # fmt: skip
"""Of ``cacheblend_rag``."""

FRAMEWORKS = frozenset(
    {"langchain_cacheblend", "llama_index.llms.cacheblend", "llama_index.postprocessor.cacheblend"}
)
"""All that their ``__all__`` has."""

CONNECTOR = ("CacheBlendConnector", "cacheblend_rag.engines.vllm.connector")
"""Class and module that vLLM's ``--kv-transfer-config`` names."""
