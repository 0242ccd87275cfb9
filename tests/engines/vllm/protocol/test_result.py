"""Results that travel: they come back as they were sent, and foreign values are refused."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.protocol.result import (
    CANCELLED,
    NO_REPORT,
    BlendResult,
    CompareResult,
    ConnectorStatus,
    EvictResult,
    Failed,
    Late,
    PrecomputeResult,
    PrefetchResult,
    Result,
    StoredKV,
    VerifyResult,
    params_of,
    result_of,
)
from cacheblend_rag.engines.vllm.transport import status_of
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.trace import (
    MOST_LAYERS,
    MOST_SELECTIONS,
    MOST_TOKENS,
    Deviations,
    Trace,
    TracedLayer,
    TracedSelection,
    TracedTokens,
)
from tests.contracts import wire
from tests.models import QWEN_SAMPLING

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**5000, 1e308, math.nan, math.inf, "", "abc", "\ud800", "0" * 32,
    "x" * 100_000, [], {}, [[]], {"a": {}}, [0] * 10_000, {"\ud800": 1}, [None], [1, "2"],
    [math.nan],
)  # fmt: skip
"""What strangers may put into a message: values that are not what they should be."""


def mutated(value: Any, draw: random.Random, deepest: int = 2_000) -> Any:
    """Return a value with something in it replaced, left out or added."""
    return wire.mutated(value, draw, deepest, HOSTILE)


HIT = ChunkReport("0" * 32, 3, 40, True, tier="host", recomputed=5, altered="a part")
MISS = ChunkReport("1" * 32, 50, 7, False, Miss.NOT_STORED, document_id="report")
BLEND = BlendResult(
    chunks=(HIT, MISS), selector="hkvd", ratio=0.15, seconds={"load": 0.5}, work_seconds=0.25
)
EARLY = TracedSelection(None, (3, 5, 9), scores=(0.5, -1.0, 0.25), chosen=(True, False, True))
AT_LAYER = TracedSelection(1, (3, 9), (0.0, 1.5), (1e-9, 3e38), (1e-9, 3e38), (False, True))
LAYER = TracedLayer(1, 3, Deviations(1.5, 1.0, 3e38, 9.0), Deviations(0.5, 0.25, 1.0, 4.0))
TOKENS = TracedTokens(1, (3, 9), (0.5, 1.5), (0.25, 1e-9))
TRACE = Trace(
    (EARLY, AT_LAYER), (3, 3, 1), truncated=True, layers=(LAYER,), tokens=TOKENS,
    protected=(4, 7),
)  # fmt: skip
TRACED = BlendResult(chunks=(HIT,), starts={"load": 0.25}, trace=TRACE)
FULL = Reason(ReasonCode.STORE_FULL, "store full")
DISK = Reason(ReasonCode.STORE_ERROR, "disk tier: no space left")
STATUS = ConnectorStatus(
    True,
    identity="a" * 64,
    vllm="0.32.0",
    cacheblend_rag="0.1.0",
    replicas=2,
    shared=True,
    namespace="b" * 32,
    store=StoredKV(3, 1 << 40),
    sampling=ResolvedSampling.of_model(QWEN_SAMPLING),
)
RESULTS: tuple[Result, ...] = (
    BLEND,
    TRACED,
    BlendResult(chunks=(MISS,)),
    BlendResult(chunks=(HIT,), selector_reason=Reason(ReasonCode.NO_PRIOR, "why not")),
    PrecomputeResult(2, 1, 80, {FULL: 1}),
    PrecomputeResult(2, refused={FULL: 4, DISK: 3}, failed={DISK: 3}),
    VerifyResult(2, {"0/1": DISK}),
    EvictResult(3, ("disk",)),
    CompareResult(0.25, 0.5),
    PrefetchResult(),
    NO_REPORT,
    BlendResult(Reason(ReasonCode.TOO_SHORT, "too few"), chunks=(MISS,), work_seconds=0.5),
    BlendResult(FULL, prefix_tokens=128, compute_share=0.75),
    BlendResult(FULL, chunks=(MISS,), seconds={"look_up": 0.25}, starts={"look_up": 0.0}),
    BlendResult(chunks=(HIT,), seconds={"load": 0.75}, load_by_tier={"host": 0.25, "disk": 0.5}),
    BlendResult(chunks=(HIT,), prefix_tokens=128),
    Failed(Reason(ReasonCode.FAILED, "blending failed: KeyError"), 0.5),
    CANCELLED,
    Late(),
    STATUS,
    ConnectorStatus(False, Reason(ReasonCode.UNSUPPORTED_POSITIONS, "learned positions")),
)


def sent(result: Result) -> dict[str, Any]:
    """What arrives when a result has gone through JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(params_of(result)))
    return plain


@pytest.mark.parametrize("result", RESULTS)
def test_a_result_survives_json(result: Result) -> None:
    read = result_of(sent(result))
    assert read == result
    assert codes(read) == codes(result)


def codes(value: Any) -> list[ReasonCode]:
    """The codes of all reasons in a result, in order: equal sentences may have different ones."""
    if isinstance(value, Reason):
        return [value.code]
    if isinstance(value, dict):
        return [code for pair in value.items() for part in pair for code in codes(part)]
    if isinstance(value, Result):
        return [code for one in vars(value).values() for code in codes(one)]
    return []


def test_what_a_newer_connector_adds_is_left_out() -> None:
    plain = sent(BLEND)
    plain["cacheblend"] |= {"colour": "red"}
    plain["cacheblend"]["chunks"][0] |= {"colour": "red"}
    plain["cacheblend"]["chunks"][1]["reason"] = ["a_miss_that_is_new", "a reason that is new"]
    plain["cacheblend"]["ratio_reason"] = ["a_code_that_is_new", "a sentence"]
    read = result_of(plain)
    assert isinstance(read, BlendResult)
    assert read.chunks[0] == HIT
    assert read.chunks[1].reason == "a reason that is new"
    assert read.chunks[1].reason_code is ReasonCode.OTHER
    assert read.ratio_reason == "a sentence"
    assert read.ratio_reason is not None
    assert read.ratio_reason.code is ReasonCode.OTHER


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"chunks": "all"}, "chunks: Input should be"),
        ({"chunks": [{"chunk_id": "0"}]}, "chunks.0.start: Field required"),
        ({"chunks": [], "ratio": float("nan")}, "ratio: Input should be a finite number"),
        ({"chunks": [], "ratio": 10**400}, "ratio: Input should be a valid number"),
        ({"chunks": [], "seconds": {"load": float("inf")}}, "seconds.load: Input should be less"),
        ({"chunks": [], "seconds": {str(n): 1 for n in range(33)}}, "at most 32 items"),
        ({"chunks": [], "load_by_tier": {"a\nb": 0}}, "must be printable"),
        ({"chunks": [], "load_by_tier": {"disk": 1}}, "load_by_tier does not add up to load"),
        ({"computed": 1, "refused": [["slow", "x"]]}, "refused.0.2: Field required"),
        ({"active": "perhaps"}, "active: Input should be a valid boolean"),
        ({"active": True, "replicas": 0}, "replicas"),
        ({"evicted": 1, "pending": ["a\n"]}, "must be printable"),
    ],
)
def test_what_is_no_result_is_a_failure_that_says_why(plain: dict[Any, Any], said: str) -> None:
    read = result_of({"cacheblend": plain})
    assert isinstance(read, Failed)
    assert "cannot be read" in read.error
    assert said in read.error
    assert not status_of(read).active


def test_whatever_a_server_says_is_read_or_refused() -> None:
    draw = random.Random(3)
    kinds = set()
    for _ in range(5_000):
        params = mutated(params_of(draw.choice(RESULTS)), draw, deepest=200)
        read = result_of(params)
        kinds.add(type(read))
        if read is not None:
            assert len(status_of(read).refusal or "") < 200_000
    assert len(kinds) == 10, "each kind, and none"


def test_a_status_that_did_not_come_says_what_came() -> None:
    assert status_of(result_of(sent(STATUS))) == STATUS
    lack = Reason(ReasonCode.NO_ROOM, "no memory")
    assert status_of(result_of(sent(Failed(lack)))) == ConnectorStatus(False, lack)
    for other in (Late(), EvictResult(1), Failed(Reason(ReasonCode.FAILED, ""))):
        told = status_of(result_of(sent(other)))
        assert told == ConnectorStatus(False, Reason(ReasonCode.NO_ANSWER, "no status came"))
        assert told.refusal is not None
        assert told.refusal.code is ReasonCode.NO_ANSWER


# Traces


def plain_trace(**changes: Any) -> dict[str, Any]:
    return {**sent(TRACED)["cacheblend"]["trace"], **changes}


def plain_selection(**changes: Any) -> dict[str, Any]:
    return plain_trace(selections=[{**plain_trace()["selections"][1], **changes}])


LONG = list(range(MOST_TOKENS + 1))


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (plain_trace(selections=plain_trace()["selections"] * MOST_SELECTIONS), "at most 8"),
        (plain_trace(rows=[1] * (MOST_LAYERS + 1)), "at most 1024"),
        (plain_trace(layers=plain_trace()["layers"] * 2), "must be strictly rising"),
        (plain_trace(protected=LONG), "at most 4096"),
        (plain_selection(positions=[9, 3]), "must be strictly rising"),
        (plain_selection(scores=[1.0]), "a score and a choice for each token"),
        (plain_selection(scores=[1.0, math.nan]), "finite number"),
        (plain_selection(key_deviations=[]), "two deviations for each token"),
    ],
)
def test_a_hostile_trace_is_a_failure_that_says_why(trace: Any, said: str) -> None:
    read = result_of({"cacheblend": {**sent(TRACED)["cacheblend"], "trace": trace}})
    assert isinstance(read, Failed)
    assert said in read.error


def test_a_trace_of_another_prompt_does_not_fit() -> None:
    assert TRACE.fits(10)
    assert not TRACE.fits(9)
    assert not Trace(rows=(11,)).fits(10)
    assert not Trace(protected=(10,)).fits(10)
    assert not Trace(tokens=TOKENS).fits(9)
    assert not Trace(layers=(LAYER,)).fits(2)
    assert Trace().fits(0)
