"""Transport: the way to a vLLM that runs the connector, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cacheblend_rag.engines.background import BackgroundLoop
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.protocol import BlendJob

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """A part of an answer as vLLM sends it.

    The last one says why the answer ended: finish_reason, and ended_by: the string or the token
    that ended it, None for the end-of-sequence token. It brings params: the connector's result.
    decode_seconds: time after the first token, where vLLM tells it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    ended_by: int | str | None = None
    params: Mapping[str, Any] | None = None
    decode_seconds: float | None = None


@dataclass(frozen=True)
class VLLMRequest:
    """What is sent: token ids, sampling, the job if there is one, and the cache salt.

    salt: requests with the same one, or none, share vLLM's prefix cache. replica: which of several
    engines behind one address is to serve it; None is any. request_id: what vLLM is to call it by;
    "" leaves that to the transport.
    """

    token_ids: tuple[int, ...]
    sampling: ResolvedSampling
    salt: str | None = None
    job: BlendJob | None = None
    replica: int | None = None
    request_id: str = ""


class Transport(ABC):
    """Sends requests to one vLLM, and brings back what it answers.

    Attributes:
        name: of engines over it, as reports name them. address: what ``open_engine`` takes to reach
            the like of it.
        model_name: what vLLM calls the model. context_window: tokens of a prompt and its answer.
        background: the loop that all requests are made in.
    """

    name: str
    address: str
    model_name: str
    context_window: int
    background: BackgroundLoop

    @abstractmethod
    def send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        """Answer a request, piece by piece if ``stream``; closing the iterator aborts it."""

    @abstractmethod
    def load_tokenizer(self) -> Any:
        """Return the model's tokenizer; raises ModelLoadError."""

    @abstractmethod
    def generation_values(self) -> Mapping[str, Any]:
        """Return the fields of the model's generation_config, for a vLLM without the connector."""

    def check_tokenizer(self, tokenizer: Any) -> None:  # noqa: B027 - a server alone can differ
        """Raise ConfigError when vLLM makes other tokens of a text than ``tokenizer``."""

    @abstractmethod
    async def _stop(self) -> None:
        """Let go of vLLM."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns, done in the background."""
        return self.background.run(work)

    def close(self) -> None:
        """Give up what is at work and let go of vLLM; again is harmless."""
        self.background.close(self._stop)
