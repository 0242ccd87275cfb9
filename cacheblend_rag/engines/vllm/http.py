"""The HTTP transport to a running vLLM server, local or remote."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from cacheblend_rag.engines.background import BackgroundLoop
from cacheblend_rag.engines.model_files import generation_values, load_tokenizer
from cacheblend_rag.engines.vllm.connection import ServedModel, ServerConnection
from cacheblend_rag.engines.vllm.transport import Piece, Transport, VLLMRequest
from cacheblend_rag.errors import ConfigError, ModelLoadError
from cacheblend_rag.models import public_name, resolve
from cacheblend_rag.settings.secret import Secret
from cacheblend_rag.text.encoder import encode_plainly

VOCABULARY_SAMPLE = "The vocabulary of 2024: naïve, Größe, 漢字 🙂\n\t{'x': [0.5]}"


class VLLMServer(Transport):
    """A server that ``cacheblend-rag serve`` started. vLLM need not be installed here."""

    name = "vllm-server"

    def __init__(
        self,
        url: str,
        *,
        model: str | Path | None = None,
        api_key: str | Secret | None = None,
        timeout_seconds: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        """Ask the server which models it serves.

        Args:
            url: with or without ``/v1``.
            model: the model whose tokenizer is used; also selects one of several served models.
                None is the name or folder that the server loaded.
            api_key: the server's key, the environment's CACHEBLEND_API_KEY by default; it
                is never logged.
            timeout_seconds: for each attempt to get an answer, and between two pieces of a stream.
            max_retries: of requests that were not answered.

        Raises:
            MissingExtraError: without ``openai``.
            EngineUnavailableError: when no vLLM answers.
            ConfigError: when several models are served and none of them is ``model``.
        """
        super().__init__()
        self._connection = ServerConnection(
            url,
            api_key=Secret.of(api_key),
            timeout_seconds=timeout_seconds,
            max_retries=max_retries,
            counts=self.counts,
        )
        self.address = self._connection.url
        self.background = BackgroundLoop("cacheblend-vllm-server")
        self._model = model
        try:
            self._served = self.run(self._connection.find_model(names_at_server(model)))
        except BaseException:
            self.close()
            raise
        self.model_name, self.context_window = self._served.name, self._served.context_window

    def load_tokenizer(self) -> Any:
        """Return the tokenizer of the given model, or of the model that the server loaded."""
        try:
            return load_tokenizer(self._model or self._served.source)
        except ModelLoadError as error:
            raise ModelLoadError(
                f"{error}: prompts are tokenized here, so give model= (a hub name or a folder with "
                f"the tokenizer of served model {self._served.name!r}) or tokenizer="
            ) from error

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ConfigError unless the server tokenizes a text in the same way."""
        self.run(check_vocabulary(self._connection, self._served, tokenizer))

    def generation_values(self) -> Mapping[str, Any]:
        """Return the fields of the generation_config that is beside the tokenizer."""
        return generation_values(self._model or self._served.source)

    async def send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        """Answer a request in one piece, or piece by piece."""
        if not stream:
            yield await self._connection.complete(self._served.name, request)
            return
        async with aclosing(self._connection.stream(self._served.name, request)) as pieces:
            async for piece in pieces:
                yield piece

    async def _stop(self) -> None:
        await self._connection.close()


def names_at_server(model: str | Path | None) -> tuple[str, ...]:
    """Return the names that a server may have for a model."""
    if model is None:
        return ()
    names = (str(model), public_name(str(model)))
    try:
        return (*names, resolve(model))
    except ModelLoadError:  # the server has it, this machine need not
        return names


async def check_vocabulary(
    connection: ServerConnection, served: ServedModel, tokenizer: Any
) -> None:
    """Raise ConfigError unless the server tokenizes a text like ``tokenizer``."""
    there = await connection.tokenize(served.name, VOCABULARY_SAMPLE)
    if there != encode_plainly(tokenizer, VOCABULARY_SAMPLE):
        raise ConfigError(
            f"the tokenizer here is not that of model {served.name!r} at {connection.url}: "
            "give the model that the server loaded as model="
        )
