"""EngineSettings: which engine serves a component, opened on first use and shared in a process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

from llama_index.core.bridge.pydantic import (
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_serializer,
)
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseComponent

from cacheblend_rag import BlendConfig, Engine, SamplingParams, load_tokenizer, open_engine
from cacheblend_rag.arguments import Arguments, check_engine_name, describe
from cacheblend_rag.config import ENGINES
from cacheblend_rag.errors import ConfigError, ModelLoadError
from cacheblend_rag.secret import Secret
from llama_index.llms.cacheblend.instruction import text_before_context

CONFIG_FIELDS = frozenset(field.name for field in fields(BlendConfig))
SAMPLING = frozenset(field.name for field in fields(SamplingParams))
ENGINE_ATTRIBUTES = ("name", "model_name", "config")
SETTLED_BY_ENGINE = (
    "instruction",
    "namespace",
    "kv_path",
    "host_bytes",
    "disk_bytes",
    "device",
    "dtype",
)

_opened: WeakValueDictionary[tuple[object, ...], Engine] = WeakValueDictionary()
_opening = threading.Lock()


def is_url(engine: object) -> TypeGuard[str]:
    """Whether ``engine`` names a server."""
    return isinstance(engine, str) and engine.startswith(("http://", "https://"))


class CheckedComponent(BaseComponent):
    """A component that raises ConfigError, in one line, for an option that is wrong or none."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**self._read(options))
        except ValidationError as error:
            raise ConfigError(describe(error.errors(include_input=False))) from None

    @classmethod
    def _read(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return options by their own names, without the class' name, which serialization adds."""
        return _arguments(cls).read({n: v for n, v in options.items() if n != "class_name"})


@cache
def _arguments(component: type[BaseComponent]) -> Arguments:
    known = frozenset(component.model_fields)
    outer = {"additional_kwargs": SAMPLING, "blend_config": CONFIG_FIELDS}
    inside = {name: given for given in outer.keys() & known for name in outer[given] - known}
    return Arguments(f"option of {component.__name__}", known, inside)


@dataclass
class Held:
    """What stays in this process: neither pickled nor copied with the component that holds it."""

    engine: Engine | None = None
    was_given: bool = False

    def __reduce__(self) -> tuple[type[Held], tuple[()]]:
        return Held, ()

    def __deepcopy__(self, memo: object) -> Held:
        return self


class EngineSettings(CheckedComponent):
    """What an engine is opened with.

    Components with equal settings share one engine in a process; how KV is fused may differ, since
    every request says it. Nothing is loaded before the first ``open()``, so a component can be
    pickled and sent to a worker.

    engine may be an open Engine, which has settled ``model`` and the like; kv_path and model may be
    Paths, and blend_config a dict of its fields.
    """

    model: str | None = Field(
        default=None, description="Hub name, local folder, or 'demo' for the bundled model."
    )
    engine: str = Field(
        default="auto",
        description="'auto', 'transformers', 'vllm' or a server's URL; or give an open Engine.",
    )
    kv_path: str | None = Field(
        default=None,
        description="Folder that keeps KV and the registry of known chunks; "
        "without one they live in this process's memory.",
    )
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
    is_chat_model: bool | None = Field(
        default=None,
        description="Whether prompts are chat messages; by default, if the model has a template.",
    )
    dtype: str | None = Field(default=None, description="Precision of the model's weights.")
    device: str | None = Field(default=None, description="Where the model runs.", exclude=True)
    host_bytes: int = Field(default=4 << 30, description="Host memory for KV.", exclude=True, ge=0)
    disk_bytes: int | None = Field(default=None, description="Disk space for KV.", exclude=True)
    api_key: SecretStr | None = Field(default=None, description="A server's key.", exclude=True)

    _held: Held = PrivateAttr(default_factory=Held)
    _resolved: str | None = PrivateAttr(default=None)

    def __init__(self, **options: Any) -> None:
        named = self._read(options)
        given = named.get("engine", "auto")
        _check_engine(given)
        if isinstance(given, str):
            _check_model(named.get("model"), given)
            held = Held()
        else:
            _check_settled(named)
            held = Held(given, was_given=True)
            named["model"] = given.model_name
            named["engine"] = getattr(given, "url", given.name)
            named["blend_config"] = named.get("blend_config") or given.config
        super().__init__(**_plain(named))
        self._held = held

    @field_serializer("blend_config")
    def _plain_config(self, config: BlendConfig) -> dict[str, Any]:
        return {**asdict(config), "check_layers": list(config.check_layers)}

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse to pickle what another process could not open again, and leave out the key."""
        if self._held.was_given:
            raise ConfigError(
                "an open engine cannot be pickled: give model= and kv_path= instead of engine="
            )
        state = super().__getstate__()
        return {**state, "__dict__": {**state["__dict__"], "api_key": None}}

    def __repr_args__(self) -> Any:
        """Show what is serialized: no secret, no engine."""
        return self.model_dump().items()

    @property
    def is_open(self) -> bool:
        """Whether ``open()`` has nothing left to load."""
        return self._held.engine is not None

    def open(self) -> Engine:
        """Return the engine, opened on first use; raises a CacheBlendError of one line."""
        engine = self._held.engine
        if engine is None:
            with _opening:
                engine = _opened.get(self._key())
                if engine is None:
                    engine = self._open()
            self._held.engine = engine
        return engine

    async def aopen(self) -> Engine:
        """As open; loading happens off the event loop."""
        return self.open() if self.is_open else await asyncio.to_thread(self.open)

    def settings(self) -> dict[str, Any]:
        """Return what another component needs to share this one's engine."""
        if self._held.was_given:
            shared = {"blend_config": self.blend_config, "is_chat_model": self.is_chat_model}
            return {**shared, "engine": self._held.engine}
        options = {name: getattr(self, name) for name in EngineSettings.model_fields}
        return {**options, "instruction": self.resolve_instruction()}

    def resolve_instruction(self, template: BasePromptTemplate | None = None) -> str:
        """Return ``instruction``, or the head of ``template`` as this model's prompts show it."""
        if self.instruction is not None or self._held.was_given:
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

    def _open(self) -> Engine:
        engine = open_engine(
            self.engine,
            model=self.model or "",
            config=self.blend_config,
            instruction=self.resolve_instruction(),
            namespace=self.namespace,
            kv_path=self.kv_path,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
            device=self.device,
            dtype=self.dtype,
            api_key=Secret.of(self.api_key.get_secret_value() if self.api_key else None),
        )
        _opened[self._key()] = engine
        return engine

    def _key(self) -> tuple[object, ...]:
        """What two components must agree on to share an engine; a forked process opens its own."""
        return (
            os.getpid(),
            self.engine,
            self.model,
            self.kv_path,
            self.resolve_instruction(),
            self.namespace,
            self.blend_config.lead_in,
            self.blend_config.document_window,
            self.dtype,
            self.device,
            self.host_bytes,
            self.disk_bytes,
            self.api_key,
        )


def checked_llm(llm: Any) -> Any:
    """Return ``llm``; raises ConfigError when no engine of ours stands behind it."""
    if not isinstance(llm, EngineSettings):
        raise ConfigError(f"llm is a {type(llm).__name__}: give a CacheBlendLLM")
    return llm


def _check_engine(engine: Any) -> None:
    if isinstance(engine, str):
        check_engine_name(engine, ENGINES)
    elif isinstance(engine, EngineSettings):
        raise ConfigError(
            f"engine is a {type(engine).__name__}: give the engine of it, llm.open(), or use "
            "CacheBlendPrecompute.from_llm(llm)"
        )
    elif not all(hasattr(engine, name) for name in ENGINE_ATTRIBUTES):
        raise ConfigError(
            f"engine is a {type(engine).__name__}: give an open engine, such as llm.open(), "
            f"or {', '.join(ENGINES)} or a server's URL"
        )


def _check_model(model: Any, engine: str) -> None:
    if model in (None, "") and not is_url(engine):
        raise ConfigError(f"model={model}: name a model, or give engine= an open engine or a URL")
    if not isinstance(model, str | Path | None):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a name, a folder or 'demo', or engine= an "
            "open engine around a loaded model, open_engine(model=..., tokenizer=...)"
        )


def _check_settled(named: Mapping[str, Any]) -> None:
    """Refuse what an engine that was given would not heed."""
    defaults = {name: EngineSettings.model_fields[name].default for name in SETTLED_BY_ENGINE}
    idle = [n for n, default in defaults.items() if named.get(n) not in (None, default)]
    if named.get("model") not in (None, named["engine"].model_name):
        idle.append("model")
    if idle:
        raise ConfigError(
            f"{', '.join(sorted(idle))}: already settled by the engine given as engine="
        )


def _plain(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as fields hold them."""
    plain = {**named, "blend_config": _config(named.get("blend_config"))}
    paths = (name for name in ("model", "kv_path") if isinstance(named.get(name), Path))
    return plain | {name: str(named[name]) for name in paths}


def _config(given: Any) -> Any:
    if isinstance(given, Mapping):
        return BlendConfig.from_dict(given)
    return BlendConfig() if given is None else given


def _tokenizer(model: str | None) -> Any:
    """Return the model's tokenizer, or None: opening the model will say why it does not load."""
    try:
        return None if model is None else load_tokenizer(model)
    except ModelLoadError:
        return None
