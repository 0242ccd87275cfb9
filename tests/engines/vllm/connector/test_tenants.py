"""One vLLM serves several namespaces: nothing of one is found by another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, Document, Generation
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm import namespaces
from cacheblend_rag.engines.vllm.connector.finding import Tenants
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.in_process import carry_out, vllm_sampling
from cacheblend_rag.engines.vllm.namespaces import FIELD
from cacheblend_rag.engines.vllm.protocol.job import Ask, Job
from cacheblend_rag.engines.vllm.protocol.result import NO_REPORT, BlendResult, Result
from cacheblend_rag.engines.vllm.transport import Piece, Transport, VLLMRequest
from cacheblend_rag.errors import EngineUnavailableError
from cacheblend_rag.reason import ReasonCode
from tests.engines.vllm.exactness import SHORT
from tests.engines.vllm.inprocess import InProcessEngine, LockstepVLLM
from tests.engines.vllm.opening import request_of
from tests.models import make_tokenizer, prompt_of, words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", cost_model=False)
SHORT_SAMPLING = ResolvedSampling(max_tokens=2, ignore_eos=True)
DOCUMENT = Document("d", (words(60, 1), words(40, 2)), " w7 ")


def carrying(request: VLLMRequest, namespace: str | None) -> VLLMRequest:
    """Return a request as the access middleware sends it on."""
    return replace(request, headers={} if namespace is None else {FIELD: namespace})


class TenantsVLLM(Transport):
    """What a tenant's requests are once the access middleware has seen them."""

    name = address = "vllm"

    def __init__(self, vllm: LockstepVLLM, namespace: str | None) -> None:
        super().__init__()
        self.vllm, self._namespace = vllm, namespace
        self.background, self.model_name = vllm.background, vllm.model_name
        self.context_window = vllm.context_window

    def load_tokenizer(self) -> Any:
        return make_tokenizer()

    def generation_values(self) -> Any:
        return self.vllm.generation_values()

    def send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        return self.vllm.send(carrying(request, self._namespace), stream=stream)

    async def carry_out(self, job: Job) -> Result:
        return await carry_out(job, ConnectorSettings(tenants=True), self._result)

    async def _result(self, request: VLLMRequest) -> Result | None:
        return await self.vllm._result(carrying(request, self._namespace))

    def close(self) -> None:
        """vLLM is another's."""

    async def _stop(self) -> None:
        """vLLM is another's."""


Open = Callable[[str], VLLMEngine]


@pytest.fixture
def shared(llama: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> InProcessEngine:
    """The shared vLLM, as if it had been started with tenants."""
    settings = ConnectorSettings(tenants=True)
    monkeypatch.setattr(llama.scheduler_connector.finding, "tenants", Tenants(settings))
    monkeypatch.setattr(llama.worker_connector, "_settings", settings)
    return llama


@pytest.fixture
def tenant(shared: InProcessEngine) -> Iterator[Open]:
    """Open the engine of a namespace."""
    opened: list[VLLMEngine] = []

    def open_engine(namespace: str) -> VLLMEngine:
        transport = TenantsVLLM(shared.vllm, namespace)
        opened.append(VLLMEngine(transport, config=CONFIG, namespace=namespace))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


def asked(engine: VLLMEngine, head: int = 9) -> Generation:
    """An answer from the document, of which the engine knows, whoever has stored it."""
    engine.register([DOCUMENT])
    return engine.generate(prompt_of(words(20, head), *DOCUMENT.to_chunks(), words(40, 3)), SHORT)


heads = count(1000)


def hits(engine: VLLMEngine) -> list[bool]:
    """Which chunks are found, by a prompt that vLLM's own cache cannot hold."""
    return [chunk.hit for chunk in asked(engine, next(heads)).report.chunks]


def cached(
    vllm: LockstepVLLM, tokens: tuple[int, ...], namespace: str | None, salt: str = ""
) -> int:
    """Tokens of a plain prompt that vLLM has in its prefix cache for this request."""

    async def ask() -> int:
        request = carrying(VLLMRequest(tokens, SHORT_SAMPLING, salt or None), namespace)
        outputs = vllm.outputs(request, vllm_sampling(request))
        return [step.num_cached_tokens async for step in outputs][-1]

    return vllm.run(ask())


def test_who_came_past_the_middleware_reuses_nothing(tenant: Open, shared: InProcessEngine) -> None:
    acme = tenant("acme")
    acme.precompute([DOCUMENT], progress=False)
    stranger = TenantsVLLM(shared.vllm, None)
    status = stranger.ask_status()
    assert (status.active, status.namespace, status.store.chunks) == (False, "", 0)
    assert status.problem is not None
    assert status.problem.code == ReasonCode.UNSUPPORTED_REQUEST
    engine = VLLMEngine(stranger, config=CONFIG, namespace="acme")
    answer = asked(engine)
    assert answer.report.blended is False
    assert "belongs to no namespace" in str(answer.report.reason)
    assert len(answer.token_ids) == SHORT.max_tokens, "vLLM answers it"
    with pytest.raises(EngineUnavailableError, match="belongs to no namespace"):
        engine.stored([acme.key(chunk) for chunk in DOCUMENT.to_chunks()])


def test_vllms_own_blocks_are_apart(tenant: Open, shared: InProcessEngine) -> None:
    """No tenant finds out by the time to the first token what another one has asked."""
    tokens = tuple(shared.tokenize(words(300, 77)))
    names = ["acme", "globex", "default", None]
    assert [cached(shared.vllm, tokens, name) for name in names] == [0, 0, 0, 0]
    again = [cached(shared.vllm, tokens, name) for name in names]
    assert all(held >= 128 for held in again), "each has its own from then on"
    forged = f" {namespaces.block_mark('acme')}"
    assert [cached(shared.vllm, tokens, name, forged) for name in names] == [0, 0, 0, 0]


def test_blended_blocks_are_apart(tenant: Open, shared: InProcessEngine) -> None:
    acme, globex = map(tenant, ("acme", "globex"))
    for engine in (acme, globex):
        engine.precompute([DOCUMENT], progress=False)
        tiers = {chunk.tier for chunk in asked(engine).report.chunks}
        assert tiers == {"host"}, "none of another's blend is taken for its own"
    assert {chunk.tier for chunk in asked(acme).report.chunks} == {"prefix cache"}
    globex.evict_document("d")
    assert (hits(acme), hits(globex)) == ([True, True], [False, False]), "nor deleted"


def test_results_and_memory_are_no_other_tenants(tenant: Open) -> None:
    acme, globex, default = map(tenant, ("acme", "globex", "default"))
    acme.precompute([DOCUMENT], progress=False)
    acme.register([DOCUMENT])
    prompt = prompt_of(words(20, 9), *DOCUMENT.to_chunks(), words(40, 3))
    request = request_of(acme, prompt, SHORT, CONFIG)
    report = Ask(kind="report", report_id=request.wish.report_id)

    async def drain() -> None:
        async for _ in acme.transport.send(request, stream=False):
            pass

    acme.transport.run(drain())
    assert globex.transport.run(globex.carry_out(report)) == NO_REPORT
    assert isinstance(acme.transport.run(acme.carry_out(report)), BlendResult)
    with pytest.raises(EngineUnavailableError, match="release frees the memory of all tenants"):
        globex.release()
    assert hits(acme) == [True, True]
    assert default.release() > 0
