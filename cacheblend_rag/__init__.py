"""cacheblend-rag: reuse retrieved passages' KV caches, computed once, and answer sooner.

The names below are the public interface; anything else may change without notice. The last of them
are for components of other frameworks, such as those of ``integrations/``, which take options and
open an engine by them. Names that need other packages, such as PyTorch or NumPy, are imported on
first use, so that importing the package stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    DamagedChunkError,
    DatasetError,
    EngineUnavailableError,
    ForeignChunkError,
    MissingExtraError,
    ModelLoadError,
    OutOfMemoryError,
    PromptError,
    PromptTooLongError,
    StoreError,
    UnsupportedModelError,
)
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.settings.options import Arguments, names_of
from cacheblend_rag.text.chunk import BOUNDARY_KEY, Chunk, Document, read_boundary, read_hints

if TYPE_CHECKING:
    from cacheblend_rag.component import EngineComponent, EngineSource
    from cacheblend_rag.engines.after_answer import RequestWatcher
    from cacheblend_rag.engines.answer import Delta, Generation, TokenLogprob
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.factory import open_engine
    from cacheblend_rag.engines.model_files import load_tokenizer
    from cacheblend_rag.engines.prepare import PreparedPrompt, TurnPrompt
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.engines.structured import StructuredOutputs
    from cacheblend_rag.engines.tool_use import read_arguments, read_tool_choice
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.folders import write_private
    from cacheblend_rag.kv import ChunkKV, KVKey, TieredKVStore
    from cacheblend_rag.models import public_name
    from cacheblend_rag.observe.doctor import Diagnosis, diagnose
    from cacheblend_rag.observe.explain import Explanation
    from cacheblend_rag.observe.metrics import EngineMetrics
    from cacheblend_rag.observe.rules import Finding, SettingChange
    from cacheblend_rag.observe.tracing import trace_requests
    from cacheblend_rag.prefill.conversation_kv import ConversationKV
    from cacheblend_rag.progress import ProgressCallbacks
    from cacheblend_rag.quality.tune import tune_model
    from cacheblend_rag.quality.verify import verify_model
    from cacheblend_rag.rag.conversation import Conversation, forget_conversation
    from cacheblend_rag.rag.long_document import (
        LongDocumentAnalysis,
        LongDocumentReport,
        PromptAnswer,
        WindowAnswer,
        analyze_long_document,
    )
    from cacheblend_rag.rag.prompt import PassageOrder
    from cacheblend_rag.report import (
        BlendReport,
        ChunkReport,
        FillReport,
        GuardReport,
        PrecomputeReport,
    )
    from cacheblend_rag.settings import (
        BlendConfig,
        EngineConfig,
        GuardConfig,
        LeadInConfig,
        Profile,
        StoreConfig,
    )
    from cacheblend_rag.settings.base import CheckedOptions
    from cacheblend_rag.text.chat import ChatPrompt, text_before
    from cacheblend_rag.text.encoder import Segment
    from cacheblend_rag.text.prompt import BlendPrompt
    from cacheblend_rag.text.registry import ChunkRegistry
    from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry
    from cacheblend_rag.text.tools import ToolCall

__version__ = "0.1.0"

_PLACES = {
    "engines.after_answer": "RequestWatcher",
    "engines.answer": "Delta Generation TokenLogprob",
    "engines.base": "Engine",
    "component": "EngineComponent EngineSource",
    "engines.factory": "open_engine",
    "engines.model_files": "load_tokenizer",
    "engines.prepare": "PreparedPrompt TurnPrompt",
    "engines.sampling": "SamplingParams",
    "engines.structured": "StructuredOutputs",
    "engines.tool_use": "read_arguments read_tool_choice",
    "engines.transformers": "TransformersEngine",
    "observe.explain": "Explanation",
    "folders": "write_private",
    "kv": "ChunkKV KVKey TieredKVStore",
    "models": "public_name",
    "observe.doctor": "Diagnosis diagnose",
    "observe.rules": "Finding SettingChange",
    "observe.metrics": "EngineMetrics",
    "observe.tracing": "trace_requests",
    "prefill.conversation_kv": "ConversationKV",
    "quality.tune": "tune_model",
    "quality.verify": "verify_model",
    "rag.conversation": "Conversation forget_conversation",
    "rag.long_document": "LongDocumentAnalysis LongDocumentReport PromptAnswer WindowAnswer "
    "analyze_long_document",
    "rag.prompt": "PassageOrder",
    "progress": "ProgressCallbacks",
    "report": "BlendReport ChunkReport FillReport GuardReport PrecomputeReport",
    "settings": "BlendConfig EngineConfig GuardConfig LeadInConfig Profile StoreConfig",
    "settings.base": "CheckedOptions",
    "text.chat": "ChatPrompt text_before",
    "text.encoder": "Segment",
    "text.prompt": "BlendPrompt",
    "text.registry": "ChunkRegistry",
    "text.sqlite_registry": "SharedChunkRegistry",
    "text.tools": "ToolCall",
}
_LAZY = {
    name: f"cacheblend_rag.{place}" for place, names in _PLACES.items() for name in names.split()
}

__all__ = [
    "BlendConfig",
    "BlendPrompt",
    "BlendReport",
    "CacheBlendError",
    "ChatPrompt",
    "Chunk",
    "ChunkKV",
    "ChunkRegistry",
    "ChunkReport",
    "ConfigError",
    "Conversation",
    "ConversationKV",
    "DamagedChunkError",
    "DatasetError",
    "Delta",
    "Diagnosis",
    "Document",
    "Engine",
    "EngineConfig",
    "EngineMetrics",
    "EngineUnavailableError",
    "Explanation",
    "FillReport",
    "Finding",
    "ForeignChunkError",
    "Generation",
    "GuardConfig",
    "GuardReport",
    "KVKey",
    "LeadInConfig",
    "LongDocumentAnalysis",
    "LongDocumentReport",
    "MissingExtraError",
    "ModelLoadError",
    "OutOfMemoryError",
    "PassageOrder",
    "PrecomputeReport",
    "PreparedPrompt",
    "Profile",
    "ProgressCallbacks",
    "PromptAnswer",
    "PromptError",
    "PromptTooLongError",
    "Reason",
    "ReasonCode",
    "RequestWatcher",
    "SamplingParams",
    "Segment",
    "SettingChange",
    "SharedChunkRegistry",
    "StoreConfig",
    "StoreError",
    "StructuredOutputs",
    "TieredKVStore",
    "TokenLogprob",
    "ToolCall",
    "TransformersEngine",
    "TurnPrompt",
    "UnsupportedModelError",
    "WindowAnswer",
    "analyze_long_document",
    "diagnose",
    "forget_conversation",
    "load_tokenizer",
    "open_engine",
    "trace_requests",
    "tune_model",
    "verify_model",
    # For components of other frameworks:
    "BOUNDARY_KEY",
    "Arguments",
    "CheckedOptions",
    "EngineComponent",
    "EngineSource",
    "names_of",
    "public_name",
    "read_arguments",
    "read_boundary",
    "read_hints",
    "read_tool_choice",
    "text_before",
    "write_private",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
