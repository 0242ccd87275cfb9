"""EngineOptions: which engine a class works on, and what prompts say before their passages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cacheblend_rag import Engine, EngineComponent, EngineSource, public_name, text_before
from langchain_core.messages import HumanMessage
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder
from langchain_core.utils import secret_from_env
from pydantic import ConfigDict, Field, InstanceOf, SecretStr, model_validator

from langchain_cacheblend.messages import plain_text, to_openai_messages

MARK = "\ue000"


class EngineOptions(EngineComponent):
    """The engine, and how to open one.

    Give either ``engine=`` an engine (``llm.engine``, say, to share its model, its known chunks and
    its KV) or ``model=`` and, where the defaults do not suit, the options below. An engine is
    opened on first use; objects with equal settings share one. Raises ConfigError, in one line, for
    an option that is wrong or none.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, populate_by_name=True, hide_input_in_errors=True
    )

    model: Any = Field(default=None, repr=False, exclude=True)
    """A name (``smollm2``, ``demo``, a GGUF file, a folder, a hub name) or a loaded model."""
    engine_source: Any = Field(default="auto", alias="engine", repr=False, exclude=True)
    """An engine, or the kind to open: ``auto``, ``transformers``, ``vllm``, a server's URL."""
    tokenizer: Any = Field(default=None, repr=False, exclude=True)
    """The model's own by default; must be given with a loaded model."""
    instruction: str | InstanceOf[BasePromptTemplate[Any]] | None = Field(default=None, repr=False)
    """What prompts say before their first passage, or the prompt template, which tells it."""
    api_key: SecretStr | None = Field(
        default_factory=secret_from_env("CACHEBLEND_API_KEY", default=None), exclude=True
    )
    """What a server asks for; the environment variable CACHEBLEND_API_KEY by default."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        self._source = EngineSource.of(self.engine_source, self.model, example="llm.engine")
        self._source.keep_for(self)
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        self._source.check_settled({name: getattr(self, name) for name in defaults}, defaults)
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy everything but the engine and a loaded model, which copies share."""
        shared = (self.engine_source, self.model, self.tokenizer)
        return super().__deepcopy__({**(memo or {}), **{id(part): part for part in shared}})

    @property
    def engine(self) -> Engine:
        """The engine, opened on first use, as by ``open()``."""
        return self.open()

    @property
    def model_name(self) -> str:
        """The model's hub name, or its folder's own name; a server alone is asked for it."""
        if self._source.was_given or not self.model:
            return str(self.engine.model_name)
        name = str(self.model if isinstance(self.model, str | Path) else self.model.name_or_path)
        return public_name(name) or "model"

    @property
    def engine_identity(self) -> str:
        """A hash that differs wherever model, precision, instruction or namespace do.

        Opens nothing unless a loaded model, or a server alone, was given. It holds no path, URL or
        secret.
        """
        if self._source.was_given or not isinstance(self.model, str | Path):
            return self.engine.fingerprint
        opened = self.engine_source, str(self.model), self.dtype, self.namespace
        settings = self.instruction, self.blend_config, self.lead_in
        return hashlib.sha256(repr((opened, settings)).encode()).hexdigest()[:32]

    def _own_options(self) -> dict[str, Any]:
        told = self.instruction
        return {
            "engine": self.engine_source,
            "model": self.model or "",
            "tokenizer": self.tokenizer,
            "instruction": TemplateInstruction(told)
            if isinstance(told, BasePromptTemplate)
            else told or "",
        }


@dataclass(frozen=True)
class TemplateInstruction:
    """Renders the text of a prompt template before its passages, with the model's tokenizer."""

    template: BasePromptTemplate[Any]

    def __call__(self, tokenizer: Any) -> str:
        return prompt_instruction(self.template, tokenizer)

    def __hash__(self) -> int:
        return hash(repr(self.template))


def prompt_instruction(prompt: BasePromptTemplate[Any], tokenizer: Any) -> str:
    """Return the text that every prompt of this template begins with, as the model reads it.

    That is the rendered prompt up to its first variable, chat template included. Where the passages
    are not the first variable (a history stands before them, say), it ends there. A date in the
    chat template is that of a fixed day.
    """
    values: dict[str, Any] = dict.fromkeys(prompt.input_variables, MARK)
    for part in prompt.messages if isinstance(prompt, ChatPromptTemplate) else ():
        if isinstance(part, MessagesPlaceholder):
            values[part.variable_name] = [HumanMessage(MARK)]
    messages = to_openai_messages(prompt.format_prompt(**values).to_messages())
    if not getattr(tokenizer, "chat_template", None):
        return plain_text(messages).partition(MARK)[0]
    return text_before(MARK, messages, tokenizer)
