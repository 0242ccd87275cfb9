"""EngineSettings: which engine serves a component, opened on first use and shared in a process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

from llama_index.core.bridge.pydantic import Field, PrivateAttr, SecretStr, field_serializer
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseComponent

from cacheblend_rag import BlendConfig, Engine, load_tokenizer, open_engine
from cacheblend_rag.errors import ConfigError, ModelLoadError
from cacheblend_rag.secret import Secret, check_server_url
from llama_index.llms.cacheblend.instruction import text_before_context

_opened: WeakValueDictionary[tuple[object, ...], Engine] = WeakValueDictionary()
_opening = threading.Lock()


def is_url(engine: object) -> TypeGuard[str]:
    """Whether ``engine`` names a server."""
    return isinstance(engine, str) and engine.startswith(("http://", "https://"))


@dataclass
class Held:
    """What stays in this process: neither pickled nor copied with the component that holds it."""

    engine: Engine | None = None
    was_given: bool = False

    def __reduce__(self) -> tuple[type[Held], tuple[()]]:
        return Held, ()

    def __deepcopy__(self, memo: object) -> Held:
        return self


class EngineSettings(BaseComponent):
    """What an engine is opened with.

    Components with equal settings share one engine in a process; how KV is fused may differ, since
    every request says it. Nothing is loaded before the first ``open()``, so a component can be
    pickled and sent to a worker.
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
    host_bytes: int = Field(default=4 << 30, description="Host memory for KV.", exclude=True)
    disk_bytes: int | None = Field(default=None, description="Disk space for KV.", exclude=True)
    api_key: SecretStr | None = Field(default=None, description="A server's key.", exclude=True)

    _held: Held = PrivateAttr(default_factory=Held)
    _resolved: str | None = PrivateAttr(default=None)

    def __init__(
        self,
        *,
        model: str | Path | None = None,
        engine: str | Engine = "auto",
        kv_path: str | Path | None = None,
        blend_config: BlendConfig | Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        if isinstance(blend_config, Mapping):
            blend_config = BlendConfig.from_dict(blend_config)
        given = None if isinstance(engine, str) else engine
        if given is not None:
            model = given.model_name
            blend_config = blend_config or given.config
        elif model is None and not is_url(engine):
            raise ConfigError("model=None: name a model, or give engine= an open engine or a URL")
        elif is_url(engine):
            check_server_url(engine)
        super().__init__(
            model=None if model is None else str(model),
            engine=engine if isinstance(engine, str) else getattr(engine, "url", engine.name),
            kv_path=None if kv_path is None else str(kv_path),
            blend_config=blend_config or BlendConfig(),
            **fields,
        )
        self._held = Held(given, was_given=given is not None)

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
        fields = {name: getattr(self, name) for name in EngineSettings.model_fields}
        if self._held.was_given:
            fields["engine"] = self._held.engine
        return {**fields, "instruction": self.resolve_instruction()}

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


def _tokenizer(model: str | None) -> Any:
    """Return the model's tokenizer, or None: opening the model will say why it does not load."""
    try:
        return None if model is None else load_tokenizer(model)
    except ModelLoadError:
        return None
