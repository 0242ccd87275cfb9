"""The line that is logged of each request: counts, codes and times, and no text."""

from __future__ import annotations

import logging
from typing import Any

from cacheblend_rag.engines.request_log import log_report, logger
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import BlendReport, ChunkReport, PhaseSeconds

CHUNKS = (
    ChunkReport("0" * 32, 3, 40, True, tier="host", recomputed=10),
    ChunkReport("1" * 32, 43, 40, True, tier="disk"),
    ChunkReport("2" * 32, 83, 7, False, Miss.NOT_STORED),
)
SECONDS = PhaseSeconds(
    find=0.001, load=0.02, recompute=0.1, decode=3.0, load_by_tier={"host": 0.005, "disk": 0.015}
)


def report(**changes: Any) -> BlendReport:
    facts = {
        "engine": "toy", "blended": True, "reason": None, "prompt_tokens": 100, "reused_tokens": 70,
        "recomputed_tokens": 10, "computed_tokens": 20, "recompute_ratio": 0.2, "selector": "hkvd",
        "lead_in": "none", "compute_share": 0.5, "seconds": SECONDS, "chunks": CHUNKS,
        "request_id": "0123456789abcdef",
    }  # fmt: skip
    return BlendReport(**{**facts, **changes})


def test_a_line_has_counts_hits_and_phases(caplog: Any) -> None:
    why = Reason(ReasonCode.TOO_SHORT, "a sentence")
    with caplog.at_level(logging.DEBUG, logger.name):
        log_report(report())
        log_report(report(reason=why, chunks=(), seconds=PhaseSeconds(recompute=0.25)))
    blended, fallen_back = caplog.messages
    assert blended == (
        "request 0123456789abcdef: 70 tokens reused, 10 recomputed, 20 computed; 2 of 3 chunks hit "
        "(1 disk, 1 host, 1 not_stored); first token 121.0 ms: find 1.0 load 20.0 recompute 100.0 "
        "(load from host 5.0, disk 15.0)"
    )
    assert "20 computed (too_short); 0 of 0 chunks hit; first token 250.0 ms: " in fallen_back
    assert "a sentence" not in fallen_back
    with caplog.at_level(logging.INFO, logger.name):
        log_report(report())
    assert len(caplog.messages) == 2
