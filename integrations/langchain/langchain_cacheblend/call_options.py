"""The options of one call of ChatCacheBlend."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag import Arguments, Chunk, ConfigError, SamplingParams, read_hints

from langchain_cacheblend.structured_output import to_structured_outputs
from langchain_cacheblend.tool_calling import Choice, Tool, to_engine_tools, to_tool_choice

SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
LOGPROB_FIELDS = ("logprobs", "top_logprobs")
OWN_FIELDS = (*SAMPLING_FIELDS, *LOGPROB_FIELDS)
"""The call options that are fields of the model, too."""
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
FORM_FIELDS = ("response_format", "structured_outputs")
BLEND_FIELDS = ("recompute_ratio", "hints", "conversation")
CALL = Arguments(
    "call option",
    frozenset({*OWN_FIELDS, *TOOL_FIELDS, *FORM_FIELDS, *BLEND_FIELDS, "stop"}),
)
CORE_FIELDS = frozenset({"stream"})
"""Call options that langchain-core reads itself."""


def read_options(given: Mapping[str, Any], stop: str | list[str] | None) -> dict[str, Any]:
    """Return the options of a call that are given; raises ConfigError for an unknown one."""
    own = {name: value for name, value in given.items() if name not in CORE_FIELDS}
    return CALL.told(_with_stop(own, stop))


@dataclass(frozen=True)
class AskedTools:
    """The tools of one call.

    Args:
        tools: in the OpenAI form. choice: as a ChatPrompt takes it.
        parallel: whether an answer may call several at once.
    """

    tools: Sequence[Tool] = ()
    choice: Choice = "auto"
    parallel: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> AskedTools:
        """Read TOOL_FIELDS; raises ConfigError for a wrong one."""
        tools = to_engine_tools(options.get("tools") or [])
        choice = to_tool_choice(options.get("tool_choice"), tools)
        if not tools:
            if choice == "required":
                raise ConfigError("tool_choice='required' needs tools: bind_tools([...])")
            return cls()
        return cls(tools, choice, options.get("parallel_tool_calls") is not False)


def told_options(options: Mapping[str, Any], stop: str | list[str] | None) -> dict[str, Any]:
    """Return options by their own names, hinted chunks by hashes: traces and keys need no text."""
    told = CALL.renamed(_with_stop(options, stop))
    told.pop("conversation", None)  # holds a secret, and changes no answer on purpose
    if told.get("hints"):
        told["hints"] = [_hint_name(hint) for hint in read_hints(told["hints"])]
    return told


def to_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters.

    values: all of OWN_FIELDS and ``stop``; FORM_FIELDS where they are given. Raises ConfigError.
    """
    logprobs, top = values["logprobs"], values["top_logprobs"]
    if logprobs is not None and not isinstance(logprobs, bool):
        raise ConfigError(f"logprobs={logprobs!r:.40} must be True or False; see top_logprobs")
    if logprobs is None:
        logprobs = top is not None
    return SamplingParams(
        **{name: values[name] for name in (*SAMPLING_FIELDS, "stop")},
        logprobs=(top or 0) if logprobs else None,
        structured_outputs=to_structured_outputs(
            values.get("structured_outputs"), values.get("response_format")
        ),
    )


def _with_stop(options: Mapping[str, Any], stop: str | list[str] | None) -> dict[str, Any]:
    return {**options} if stop is None else {**options, "stop": stop}


def _hint_name(hint: Chunk | str) -> str:
    if isinstance(hint, str):
        return hint
    digest = hashlib.sha256(repr(hint).encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{hint.document_id}#{digest}"
