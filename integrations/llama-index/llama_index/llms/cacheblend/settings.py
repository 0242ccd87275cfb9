"""EngineSettings: which engine serves a component, opened on first use and shared in a process."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeGuard

from llama_index.core.bridge.pydantic import (
    Field,
    PrivateAttr,
    SecretStr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    field_serializer,
    field_validator,
    model_serializer,
)
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseComponent

from cacheblend_rag import (
    Arguments,
    BlendConfig,
    ConfigError,
    Engine,
    EngineConfig,
    EngineSource,
    LeadInConfig,
    ModelLoadError,
    SamplingParams,
    Secret,
    StoreConfig,
    describe_errors,
    load_tokenizer,
    names_of,
    store_fields,
)
from llama_index.llms.cacheblend.instruction import text_before_context

INSIDE = {
    "blend_config": BlendConfig,
    "lead_in": LeadInConfig,
    "additional_kwargs": SamplingParams,
}
"""Options that are settings themselves."""
LATER = {"lead_in", "register_only"}
"""Options that older keys of components do not hold."""


def is_url(engine: object) -> TypeGuard[str]:
    """Whether ``engine`` names a server."""
    return isinstance(engine, str) and engine.startswith(("http://", "https://"))


class CheckedComponent(BaseComponent):
    """A component that raises ConfigError, in one line, for an option that is wrong or none."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**self._read(options))
        except ValidationError as error:
            raise ConfigError(describe_errors(error.errors(include_input=False))) from None

    @classmethod
    def _read(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return options by their own names, without the class' name, which serialization adds."""
        return _arguments(cls).read({n: v for n, v in options.items() if n != "class_name"})


@cache
def _arguments(component: type[BaseComponent]) -> Arguments:
    known = {*component.model_fields}
    if issubclass(component, EngineSettings):
        known.add("store")
    return Arguments.holding(f"option of {component.__name__}", known, INSIDE)


class _Chosen(CheckedComponent):
    """Which engine is opened on which model."""

    model: str | None = Field(
        default=None, description="Hub name, local folder, or 'demo' for the bundled model."
    )
    engine: str = Field(
        default="auto",
        description="'auto', 'transformers', 'vllm' or a server's URL; or give an open Engine.",
    )


if TYPE_CHECKING:
    _Stored = _Chosen
else:
    # The folder alone changes what is found: sizes and the like are no part of a component's key.
    _Stored = create_model("_Stored", __base__=_Chosen, **store_fields(told={"kv_path"}))


class EngineSettings(_Stored):
    """What an engine is opened with.

    Components with equal settings share one engine in a process; how KV is fused may differ, since
    every request says it. Nothing is loaded before the first ``open()``, so a component can be
    pickled and sent to a worker.

    engine may be an open Engine, which has settled ``model`` and the like; model may be a Path,
    and blend_config and lead_in dicts of their fields. Where KV is kept is told by StoreConfig's
    own names (kv_path, host_bytes, ...) or as a whole, ``store=StoreConfig(...)`` or a dict.
    """

    instruction: str | None = Field(
        default=None,
        description="What prompts say before their first chunk; "
        "by default the head of LlamaIndex's question template.",
    )
    namespace: str = Field(
        default="default", description="Tenants with different namespaces never share KV."
    )
    blend_config: BlendConfig = Field(
        default_factory=BlendConfig, description="How cached chunk KV is fused."
    )
    lead_in: LeadInConfig | None = Field(
        default=None,
        description="What chunks are computed behind: a LeadInConfig, its fields or its kind.",
    )
    is_chat_model: bool | None = Field(
        default=None,
        description="Whether prompts are chat messages; by default, if the model has a template.",
    )
    dtype: str | None = Field(default=None, description="Precision of the model's weights.")
    fill_on_miss: bool = Field(
        default=False,
        description="Compute known chunks whose KV was missed, while no request waits.",
        exclude=True,
    )
    device: str | None = Field(default=None, description="Where the model runs.", exclude=True)
    api_key: SecretStr | None = Field(default=None, description="A server's key.", exclude=True)

    _source: EngineSource = PrivateAttr(default_factory=lambda: EngineSource(shared=True))
    _resolved: str | None = PrivateAttr(default=None)

    def __init__(self, **options: Any) -> None:
        named = self._read(options)
        given = named.get("engine", "auto")
        source = _source_of(given)
        if isinstance(given, str):
            _check_model(named.get("model"), given)
        else:
            source.check_settled(named, {n: f.default for n, f in type(self).model_fields.items()})
            named["model"], named["engine"] = given.model_name, given.address
            named["blend_config"] = named.get("blend_config") or given.config
        super().__init__(**_plain(named))
        self._source = source

    @classmethod
    def _read(cls, options: dict[str, Any]) -> dict[str, Any]:
        return StoreConfig.spread(super()._read(options))

    @field_validator("lead_in", mode="before")
    @classmethod
    def _read_lead_in(cls, given: Any) -> Any:
        return LeadInConfig.of(given) if isinstance(given, str | Mapping) else given

    @field_serializer("blend_config")
    def _plain_config(self, config: BlendConfig) -> dict[str, Any]:
        return {**asdict(config), "check_layers": list(config.check_layers)}

    @model_serializer(mode="wrap")
    def custom_model_dump(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Name some options only where they were given: all are part of a component's key."""
        told = {**handler(self), "class_name": self.class_name()}
        return {name: value for name, value in told.items() if name not in LATER or value}

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._source = copy(self._source)
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse to pickle what another process could not open again, and leave out the key."""
        self._source.check_portable()
        state = super().__getstate__()
        return {**state, "__dict__": {**state["__dict__"], "api_key": None}}

    def __repr_args__(self) -> Any:
        """Show what is serialized: no secret, no engine."""
        return self.model_dump().items()

    @property
    def store(self) -> StoreConfig:
        """Where the engine keeps KV."""
        return StoreConfig(**{name: getattr(self, name) for name in names_of(StoreConfig)})

    @property
    def is_open(self) -> bool:
        """Whether ``open()`` has nothing left to load."""
        return self._source.is_open

    def open(self) -> Engine:
        """Return the engine, opened on first use.

        Raises:
            CacheBlendError: when it cannot be opened, in one line.
        """
        return self._source.open(self._engine_config)

    async def aopen(self) -> Engine:
        """Return the engine as ``open`` does; loading happens off the event loop."""
        return await self._source.aopen(self._engine_config)

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
        if template is None and self._resolved is not None:
            return self._resolved
        instruction = text_before_context(
            template,
            tokenizer=_tokenizer(self.model),
            is_chat_model=self.is_chat_model,
            system_prompt=getattr(self, "system_prompt", None),
        )
        if template is None:
            self._resolved = instruction
        return instruction

    def _engine_config(self) -> EngineConfig:
        return EngineConfig(
            engine=self.engine,
            model=self.model or "",
            instruction=self.resolve_instruction(),
            namespace=self.namespace,
            blend=self.blend_config,
            lead_in=LeadInConfig.of(self.lead_in),
            store=self.store,
            fill_on_miss=self.fill_on_miss,
            device=self.device,
            dtype=self.dtype,
            api_key=Secret.of(self.api_key.get_secret_value() if self.api_key else None),
        )


def checked_llm(llm: Any) -> Any:
    """Return ``llm``; raises ConfigError when no engine of ours stands behind it."""
    if not isinstance(llm, EngineSettings):
        raise ConfigError(f"llm is a {type(llm).__name__}: give a CacheBlendLLM")
    return llm


def _source_of(engine: Any) -> EngineSource:
    if isinstance(engine, EngineSettings):
        raise ConfigError(
            f"engine is a {type(engine).__name__}: give the engine of it, llm.open(), or use "
            "CacheBlendPrecompute.from_llm(llm)"
        )
    return EngineSource.of(engine, example="llm.open()", shared=True)


def _check_model(model: Any, engine: str) -> None:
    if model in (None, "") and not is_url(engine):
        raise ConfigError(f"model={model}: name a model, or give engine= an open engine or a URL")
    if not isinstance(model, str | Path | None):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a name, a folder or 'demo', or engine= an "
            "open engine around a loaded model, open_engine(model=..., tokenizer=...)"
        )


def _plain(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as fields hold them."""
    blend, model = named.get("blend_config"), named.get("model")
    return {
        **named,
        "blend_config": BlendConfig.of(blend) if isinstance(blend, Mapping | None) else blend,
        "model": str(model) if isinstance(model, Path) else model,
    }


def _tokenizer(model: str | None) -> Any:
    """Return the model's tokenizer, or None: opening the model will say why it does not load."""
    try:
        return None if model is None else load_tokenizer(model)
    except ModelLoadError:
        return None
