"""A vLLM server's OpenAI-compatible API with one-line errors, and the transport over it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.engines.answer import RawLogprob
from cacheblend_rag.engines.model_files import generation_values, load_tokenizer
from cacheblend_rag.engines.stream import BackgroundLoop
from cacheblend_rag.engines.structured import StructuredOutputs
from cacheblend_rag.engines.vllm.protocol.job import PARAMETER, Job
from cacheblend_rag.engines.vllm.protocol.result import (
    NO_CONNECTOR,
    Failed,
    Late,
    Result,
    params_of,
    result_of,
)
from cacheblend_rag.engines.vllm.transport import Piece, Transport, VLLMRequest
from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    EngineUnavailableError,
    MissingExtraError,
    ModelLoadError,
)
from cacheblend_rag.models import public_name, resolve
from cacheblend_rag.settings.base import Secret
from cacheblend_rag.settings.options import check_server_url
from cacheblend_rag.text.encoder import encode_plainly

REQUEST_ID_HEADER = "X-Request-Id"
"""What vLLM calls a request by, in its own id of it and in its logs."""
KEY_VARIABLE = "CACHEBLEND_API_KEY"
RETRY_HEADER = "x-stainless-retry-count"
"""The header in which the ``openai`` package counts how often it has retried a request."""
NO_KEY = "none"
CONNECT_SECONDS = 5.0
CUT_OFF = ("RemoteProtocolError", "ReadError")
"""Errors of httpx after it has connected."""
BROKE_OFF = "the server's answer broke off"
TOLD_CHARACTERS = 200
LATE = params_of(Late())
"""A placeholder for a result that does not come with a stream and must be fetched."""


@dataclass(frozen=True)
class ServedModel:
    """A model that a server offers.

    name: its name in requests. source: the hub name or folder that the server loaded it from.
    context_window: tokens.
    """

    name: str
    source: str
    context_window: int


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
            max_retries: of requests that were not answered: no connection, one that broke off, a
                timeout, a server that is overloaded or fails (408, 409, 429, 5xx), with pauses from
                half a second that double.

        Raises:
            MissingExtraError: without ``openai``.
            EngineUnavailableError: when no vLLM answers.
            ConfigError: when several models are served and none of them is ``model``, or the URL
                is none of a server.
        """
        super().__init__()
        api_key = Secret.of(api_key or os.environ.get(KEY_VARIABLE) or NO_KEY)
        check_server_url(url)
        try:
            import openai
        except ImportError as error:
            raise MissingExtraError("a vLLM server as engine", "vllm-server") from error
        self._openai, self._timeout_seconds = openai, timeout_seconds
        self.address = url.rstrip("/").removesuffix("/v1")
        self._client = openai.AsyncOpenAI(
            base_url=f"{self.address}/v1",
            api_key=api_key.get_secret_value() if api_key else NO_KEY,
            timeout=openai.Timeout(timeout_seconds, connect=min(CONNECT_SECONDS, timeout_seconds)),
            max_retries=max_retries,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [self._count]}),
        )
        self.background = BackgroundLoop("cacheblend-vllm-server")
        self._model = model
        try:
            self._served = self.run(self._find_model(names_at_server(model)))
        except BaseException:
            self.close()
            raise
        self.model_name, self.context_window = self._served.name, self._served.context_window

    async def _count(self, request: Any) -> None:
        """Count a request that is about to be sent."""
        if request.headers.get(RETRY_HEADER, "0") == "0":
            self.counts.sent += 1
        else:
            self.counts.retried += 1

    async def _find_model(self, wanted: Sequence[str]) -> ServedModel:
        """Return the served model that is called or comes from one of ``wanted``, or the only one.

        Raises EngineUnavailableError when no vLLM answers, ConfigError when it serves several
        models and none of them is ``wanted``.
        """
        try:
            page = await self._client.models.list()
            served = _served([entry.to_dict() for entry in page.data])
        except self._openai.NotFoundError:
            raise self._no_vllm("it has no /v1/models") from None  # whose frames hold the key
        except (AttributeError, TypeError, ValueError, KeyError):  # a page, or other JSON
            raise self._no_vllm("its /v1/models lists no models") from None
        except Exception as error:
            raise self._failure(error) from None
        if not served:
            raise self._no_vllm("its /v1/models lacks the fields that vLLM sends")
        matching = [
            model for name in wanted for model in served if name in {model.name, model.source}
        ]
        if not matching and len({model.source for model in served}) > 1:
            names = ", ".join(model.name for model in served)
            raise ConfigError(
                f"model={next(iter(wanted), None)!r} is not served by {self.address}, "
                f"which has {names}"
            )
        return (matching or served)[0]

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
        here = encode_plainly(tokenizer, VOCABULARY_SAMPLE)
        if self.run(self._tokenize(VOCABULARY_SAMPLE)) != here:
            raise ConfigError(
                f"the tokenizer here is not that of model {self._served.name!r} at {self.address}: "
                "give the model that the server loaded as model="
            )

    async def _tokenize(self, text: str) -> tuple[int, ...]:
        """Return the server's tokens of ``text``, without special tokens around it."""
        extra = {"add_special_tokens": False, "return_token_ids": True}
        answer = await self._create(
            None,
            model=self._served.name,
            prompt=text,
            max_tokens=1,
            temperature=0.0,
            extra_body=extra,
        )
        return tuple(_extra(answer.choices[0], "prompt_token_ids") or ())

    def generation_values(self) -> Mapping[str, Any]:
        """Return the fields of the generation_config that is beside the tokenizer."""
        return generation_values(self._model or self._served.source) or {}

    async def send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        """Answer a request in one piece, or piece by piece.

        Raises EngineUnavailableError when a stream ends before its answer does.
        """
        body, most = _body(self._served.name, request), request.sampling.logprobs
        form = request.sampling.structured_outputs
        if not stream:
            answer = await self._create(form, **body)
            milliseconds = (_extra(answer, "metrics") or {}).get("generation_time_ms")
            yield _piece(
                answer.choices[0],
                most,
                params=_extra(answer, "kv_transfer_params"),
                decode_seconds=None if milliseconds is None else milliseconds / 1000,
            )
            return
        finished = False
        async with await self._create(form, **body, stream=True) as events:
            async for event in self._told(events):
                for choice in event.choices:
                    finished = finished or choice.finish_reason is not None
                    told = _extra(event, "kv_transfer_params")
                    late = LATE if request.wish.report_id else None
                    yield _piece(choice, most, params=told or late)
        if not finished:
            raise EngineUnavailableError(f"engine={self.address!r}: {BROKE_OFF}: ask again")

    async def carry_out(self, job: Job) -> Result:
        """Have a job done by the server's route for jobs."""
        try:
            answer = await self._client.post(
                "/cacheblend/jobs", body=job.model_dump(mode="json"), cast_to=dict[str, Any]
            )
        except self._openai.NotFoundError:
            return Failed(NO_CONNECTOR)
        except Exception as error:
            raise self._failure(error) from None  # whose frames hold the key
        return result_of({PARAMETER: answer}) or Failed(NO_CONNECTOR)

    async def _stop(self) -> None:
        await self._client.close()

    async def _create(self, form: StructuredOutputs | None, **body: Any) -> Any:
        try:
            return await self._client.completions.create(**body)
        except self._openai.BadRequestError as error:
            if form is None:
                raise self._failure(error) from None
            raise form.refused(_first_line(error.message)) from None
        except Exception as error:
            raise self._failure(error) from None  # whose frames hold the key

    async def _told(self, events: Any) -> AsyncIterator[Any]:
        """Yield a stream's events; failures become errors of this package."""
        try:
            async for event in events:
                yield event
        except Exception as error:
            raise self._failure(error, has_begun=True) from None  # whose frames hold the key

    def _no_vllm(self, why: str) -> EngineUnavailableError:
        return EngineUnavailableError(f"engine={self.address!r} is not a vLLM server: {why}")

    def _failure(self, error: Exception, *, has_begun: bool = False) -> CacheBlendError:
        """Return an error of one line with cause and fix, without the key.

        has_begun: whether an answer had begun.
        """
        where, known = f"engine={self.address!r}", self._openai
        if isinstance(error, known.PermissionDeniedError):
            body = error.body if isinstance(error.body, Mapping) else {}
            said = f"the server refuses: {_first_line(str(body.get('message', error.message)))}"
        elif isinstance(error, known.AuthenticationError):
            said = f"the server refuses the API key: give api_key= or set {KEY_VARIABLE}"
        elif isinstance(error, known.APITimeoutError):
            said = f"no answer within timeout_seconds={self._timeout_seconds:g}"
        elif isinstance(error, known.APIConnectionError):
            cause = type(error.__cause__ or error).__name__
            said = f"no server answers there ({cause}); start it or give another URL"
            if cause in CUT_OFF:
                said = f"what answers there broke off or speaks no HTTP ({cause})"
                said = f"{BROKE_OFF} ({cause}): ask again" if has_begun else said
        elif isinstance(error, known.APIStatusError):
            said = f"the server answers {error.status_code}: {_first_line(error.message)}"
        elif isinstance(error, known.APIError):
            said = f"the server failed: {_first_line(error.message)}"
        else:
            said = f"{BROKE_OFF} ({type(error).__name__}): ask again"
        return EngineUnavailableError(f"{where}: {said}")


def _served(entries: Sequence[Mapping[str, Any]]) -> list[ServedModel]:
    """Return the models, without adapters, among what /v1/models lists; raises ValueError."""
    return [
        ServedModel(str(entry["id"]), str(entry["root"]), int(entry["max_model_len"]))
        for entry in entries
        if entry.get("root") and entry.get("max_model_len") and not entry.get("parent")
    ]


def _body(model: str, request: VLLMRequest) -> dict[str, Any]:
    """Return the arguments of a completion.

    All are explicit, since the server's defaults come from the model's generation config.
    """
    asked, form = request.sampling, request.sampling.structured_outputs
    named = {REQUEST_ID_HEADER: request.request_id} if request.request_id else {}
    return {
        "model": model,
        "prompt": list(request.token_ids),
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": asked.seed,
        "stop": list(asked.stop),
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "logprobs": asked.logprobs,
        "extra_headers": {**request.headers, **named},
        "extra_body": {
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "repetition_penalty": asked.repetition_penalty,
            "ignore_eos": asked.ignore_eos,
            "cache_salt": request.salt,
            "kv_transfer_params": request.wish.to_params(),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "structured_outputs": form.to_vllm() if form else None,
        },
    }


def _piece(
    choice: Any,
    most: int | None,
    *,
    params: Mapping[str, Any] | None,
    decode_seconds: float | None = None,
) -> Piece:
    """most: how many likely tokens are asked for beside each token."""
    return Piece(
        choice.text,
        tuple(_extra(choice, "token_ids") or ()),
        choice.finish_reason,
        _extra(choice, "stop_reason"),
        params if choice.finish_reason else None,
        decode_seconds,
        () if most is None or choice.logprobs is None else _logprobs(choice.logprobs, most),
    )


def _logprobs(told: Any, most: int) -> tuple[RawLogprob, ...]:
    """Return the log-probabilities of a piece whose tokens are told as ``token_id:123``."""
    found = zip(told.tokens, told.token_logprobs, told.top_logprobs or (), strict=True)
    return tuple(
        RawLogprob.of(_id(token), {_id(token): logprob} | {_id(k): v for k, v in top.items()}, most)
        for token, logprob, top in found
    )


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _extra(answer: Any, name: str) -> Any:
    """Return a field of vLLM's own, beside those of the OpenAI API."""
    return (answer.model_extra or {}).get(name)


def _first_line(message: str) -> str:
    lines = message.split("\n")
    return lines[0][:TOLD_CHARACTERS]


VOCABULARY_SAMPLE = "The vocabulary of 2024: naïve, Größe, 漢字 🙂\n\t{'x': [0.5]}"


def names_at_server(model: str | Path | None) -> tuple[str, ...]:
    """Return the names that a server may have for a model."""
    if model is None:
        return ()
    names = (str(model), public_name(str(model)))
    try:
        return (*names, resolve(model))
    except ModelLoadError:  # the server has it, this machine need not
        return names
