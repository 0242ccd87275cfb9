"""EngineSettings: which engine serves a component, and what its prompts say before their chunks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.bridge.pydantic import Field, field_serializer
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.schema import BaseComponent

from cacheblend_rag import (
    CheckedOptions,
    ConfigError,
    EngineComponent,
    EngineSource,
    ModelLoadError,
    PromptError,
    SamplingParams,
    StoreConfig,
    load_tokenizer,
    text_before,
)
from llama_index.llms.cacheblend.call import plain_messages

CONTEXT_VARIABLES = ("context_str", "context_msg")
PLACE = "\ue000"


class CheckedComponent(CheckedOptions, BaseComponent):
    """A component that raises ConfigError, in one line, for an option that is wrong or unknown."""

    @classmethod
    def _read(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Leave out the class' name, which serialization adds."""
        return super()._read({n: v for n, v in options.items() if n != "class_name"})


class EngineSettings(CheckedComponent, EngineComponent):
    """The settings of an engine.

    Components with equal settings share one engine in a process; how KV is fused may differ, since
    every request sets it. Nothing is loaded before the first ``open()``, so a component can be
    pickled and sent to a worker.

    engine may be an open Engine, for which ``model`` and the like are fixed; model may be a Path,
    and blend_config and lead_in dicts of their fields. The store's settings are given by
    StoreConfig's own names (kv_path, host_bytes, ...) or as a whole, ``store=StoreConfig(...)`` or
    a dict.
    """

    _inside: ClassVar[Mapping[str, type[Any]]] = {
        **EngineComponent._inside,
        "additional_kwargs": SamplingParams,
    }

    model: str | None = Field(default=None, description="Hub name, local folder or GGUF file.")
    engine: str = Field(
        default="auto",
        description="'auto', 'transformers', 'vllm' or a server's URL; or give an open Engine.",
    )
    instruction: str | None = Field(
        default=None,
        description="What prompts say before their first chunk; "
        "by default the head of LlamaIndex's question template.",
    )
    store: StoreConfig = Field(
        default=StoreConfig(), description="Where KV is kept: a StoreConfig or its fields."
    )
    is_chat_model: bool | None = Field(
        default=None,
        description="Whether prompts are chat messages; by default, if the model has a template.",
    )

    def __init__(self, **options: Any) -> None:
        named = self._read(options)
        given, model = named.get("engine", "auto"), named.get("model")
        source = EngineSource.of(given, model, example="llm.open()")
        if isinstance(model, Path):
            named["model"] = str(model)
        if source.was_given:
            source.check_settled(named, {n: f.default for n, f in type(self).model_fields.items()})
            named["model"], named["engine"] = given.model_name, given.address
            named["blend_config"] = named.get("blend_config") or given.config
        super().__init__(**named)
        self._source = source
        source.keep_for(self)

    @field_serializer("store")
    def _told_of_store(self, store: StoreConfig) -> dict[str, Any]:
        """Tell the folder alone: sizes and the like change nothing of what is found."""
        return {"kv_path": store.kv_path}

    def __repr_args__(self) -> Any:
        """Show what is serialized: no secret, no engine."""
        return self.model_dump().items()

    def settings(self) -> dict[str, Any]:
        """Return what another component needs to share this one's engine."""
        if self._source.was_given:
            shared = {"blend_config": self.blend_config, "is_chat_model": self.is_chat_model}
            return {**shared, "engine": self._source.engine}
        options = {name: getattr(self, name) for name in EngineSettings.model_fields}
        return {**options, "instruction": self.resolve_instruction()}

    def resolve_instruction(self, template: BasePromptTemplate | None = None) -> str:
        """Return ``instruction``, or the head of ``template`` as this model's prompts show it."""
        if self.instruction is not None or self._source.was_given:
            return self.instruction or ""
        return text_before_context(
            template,
            tokenizer=_tokenizer(self.model),
            is_chat_model=self.is_chat_model,
            system_prompt=getattr(self, "system_prompt", None),
        )

    def _own_options(self) -> dict[str, Any]:
        instruction = self.resolve_instruction()
        return {"engine": self.engine, "model": self.model or "", "instruction": instruction}


def checked_llm(llm: Any) -> Any:
    """Return ``llm``; raises ConfigError when no engine of ours stands behind it."""
    if not isinstance(llm, EngineSettings):
        raise ConfigError(f"llm is a {type(llm).__name__}: give a CacheBlendLLM")
    return llm


@lru_cache(maxsize=4)
def _tokenizer(model: str | None) -> Any:
    """Return the model's tokenizer, or None: opening the model will say why it does not load."""
    try:
        return None if model is None else load_tokenizer(model)
    except ModelLoadError:
        return None


def text_before_context(
    template: BasePromptTemplate | None,
    *,
    tokenizer: Any,
    is_chat_model: bool | None,
    system_prompt: str | None,
) -> str:
    """Return what a prompt made of ``template`` says before its context.

    template: None for LlamaIndex's own question template. is_chat_model: None asks the tokenizer.
    """
    renders = bool(getattr(tokenizer, "chat_template", None))
    chat = renders if is_chat_model is None else is_chat_model
    selected = template or DEFAULT_TEXT_QA_PROMPT_SEL
    if isinstance(selected, SelectorPromptTemplate):
        asked: Any = SimpleNamespace(metadata=LLMMetadata(is_chat_model=chat))
        selected = selected.select(llm=asked)
    values = dict.fromkeys(selected.template_vars, "") | dict.fromkeys(CONTEXT_VARIABLES, PLACE)
    if not chat:
        text = f"{system_prompt}\n\n" if system_prompt else ""
        head, found, _ = (text + selected.format(llm=None, **values)).partition(PLACE)
        return head if found else ""
    messages = selected.format_messages(llm=None, **values)
    if system_prompt:
        messages = [ChatMessage(role=MessageRole.SYSTEM, content=system_prompt), *messages]
    try:
        return text_before(PLACE, plain_messages(messages), tokenizer) if renders else ""
    except PromptError:  # of the template, which will refuse the prompt too
        return ""
