"""VLLMServerEngine: a running vLLM server, which may be anywhere and serve many processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from cacheblend_rag.config import BlendConfig, LeadInConfig
from cacheblend_rag.engines.front import settled
from cacheblend_rag.engines.naming import source_of
from cacheblend_rag.engines.transformers.loading import load_tokenizer
from cacheblend_rag.engines.vllm.background import BackgroundLoop
from cacheblend_rag.engines.vllm.client import Piece, VLLMClient, VLLMRequest
from cacheblend_rag.engines.vllm.connection import ServedModel, ServerConnection
from cacheblend_rag.errors import ConfigError, ModelLoadError
from cacheblend_rag.secret import Secret
from cacheblend_rag.text.encoder import Tokenizer, encode_plainly
from cacheblend_rag.text.registry import ChunkRegistry

VOCABULARY_SAMPLE = "The vocabulary of 2024: naïve, Größe, 漢字 🙂\n\t{'x': [0.5]}"


class VLLMServerEngine(VLLMClient):
    """CacheBlend on a server that ``cacheblend-rag serve`` started.

    A server without the connector answers by ordinary prefill, and every report says so. vLLM need
    not be installed here: only prompts are tokenized.

    url: with or without ``/v1``. model: hub name or folder of the tokenizer; also says which of
    several served models is meant. None takes what the server says that it loaded. tokenizer: given
    instead of loaded. namespace: the one the server was started with. api_key: what it asks for,
    the environment's CACHEBLEND_API_KEY by default; it is never logged. timeout_seconds: for each
    attempt to get an answer, and between two pieces of a stream. max_retries: of requests that were
    not answered.

    Raises MissingExtraError without ``openai``, EngineUnavailableError when no vLLM answers,
    ConfigError when its namespace or its vocabulary is another, ModelLoadError without a tokenizer.
    """

    name = "vllm-server"

    def __init__(
        self,
        url: str,
        *,
        model: str | Path | None = None,
        tokenizer: Any = None,
        config: BlendConfig | None = None,
        registry: ChunkRegistry | None = None,
        instruction: str | Callable[[Tokenizer], str] = "",
        namespace: str = "default",
        lead_in: LeadInConfig | str | None = None,
        api_key: str | Secret | None = None,
        timeout_seconds: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        config, lead_in = settled(config, lead_in)
        api_key = Secret.of(api_key)
        self._connection = ServerConnection(
            url, api_key=api_key, timeout_seconds=timeout_seconds, max_retries=max_retries
        )
        self._background = BackgroundLoop("cacheblend-vllm-server")
        wanted = None if model is None else source_of(model)
        try:
            self._served = self._run(self._connection.find_model(wanted))
            tokenizer = tokenizer or _load_tokenizer(wanted, self._served)
            self._run(check_vocabulary(self._connection, self._served, tokenizer))
            super().__init__(
                self._served.name,
                tokenizer,
                config=config,
                registry=registry,
                instruction=instruction,
                namespace=namespace,
                lead_in=lead_in,
                background=self._background,
            )
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._connection.url

    @property
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""
        return self._served.context_window

    def close(self) -> None:
        """Give up what is at work and close the connections."""
        if self.is_open:
            self._background.give_up()
            self._run(self._connection.close())
        super().close()

    async def _send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        if not stream:
            yield await self._connection.complete(self._served.name, request)
            return
        async with aclosing(self._connection.stream(self._served.name, request)) as pieces:
            async for piece in pieces:
                yield piece


async def check_vocabulary(
    connection: ServerConnection, served: ServedModel, tokenizer: Any
) -> None:
    """Raise ConfigError unless the server makes the same tokens of a text as ``tokenizer``."""
    there = await connection.tokenize(served.name, VOCABULARY_SAMPLE)
    if there != encode_plainly(tokenizer, VOCABULARY_SAMPLE):
        raise ConfigError(
            f"the tokenizer here is not that of model {served.name!r} at {connection.url}: "
            "give the model that the server loaded as model="
        )


def _load_tokenizer(wanted: str | None, served: ServedModel) -> Any:
    try:
        return load_tokenizer(wanted or served.source)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{error}: prompts are tokenized here, so give model= (a hub name or a folder with the "
            f"tokenizer of served model {served.name!r}) or tokenizer="
        ) from error
