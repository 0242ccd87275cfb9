"""The messages between an engine and the connector, in a request's ``kv_transfer_params``.

A job is sent with a request, a result comes back with the request's last output.
"""

from cacheblend_rag.engines.vllm.protocol.job import (
    OFF_PARAMS,
    BlendJob,
    FindJob,
    SentChunk,
    SentLeadIn,
    SentSegment,
)
from cacheblend_rag.engines.vllm.protocol.result import (
    BlendResult,
    CompareResult,
    ConnectorStatus,
    Declined,
    EvictResult,
    Failed,
    KeepResult,
    Late,
    LookupResult,
    PrecomputeResult,
    PrefetchResult,
    ReleaseResult,
    Result,
    VerifyResult,
    params_of,
    result_of,
    status_of,
)

__all__ = [
    "OFF_PARAMS",
    "BlendJob",
    "BlendResult",
    "CompareResult",
    "ConnectorStatus",
    "Declined",
    "EvictResult",
    "Failed",
    "FindJob",
    "KeepResult",
    "Late",
    "LookupResult",
    "PrecomputeResult",
    "PrefetchResult",
    "ReleaseResult",
    "Result",
    "SentChunk",
    "SentLeadIn",
    "SentSegment",
    "VerifyResult",
    "params_of",
    "result_of",
    "status_of",
]
