"""EngineOptions: which engine a class works on, given ready or opened on first use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Self

from cacheblend_rag import BlendConfig, Engine, open_engine
from cacheblend_rag.arguments import Arguments, check_engine_name, describe
from cacheblend_rag.config import ENGINES
from cacheblend_rag.engines.naming import public_name
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.secret import Secret
from langchain_core.prompts import BasePromptTemplate
from langchain_core.utils import secret_from_env
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from langchain_cacheblend.instruction import prompt_instruction

SETTLED_BY_ENGINE = frozenset(
    [
        "model",
        "tokenizer",
        "instruction",
        "namespace",
        "kv_path",
        "host_bytes",
        "disk_bytes",
        "device",
        "dtype",
    ]
)

CONFIG_FIELDS = frozenset(field.name for field in fields(BlendConfig))
ENGINE_METHODS = ("generate", "precompute")

_opening = Lock()


class EngineOptions(BaseModel):
    """The engine, and how to open one.

    Give either ``engine=`` an engine (``llm.engine``, say, to share its model, its known chunks and
    its KV) or ``model=`` and, where the defaults do not suit, the options below. An engine is
    opened on first use, once. Raises ConfigError, in one line, for an option that is wrong or none.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, populate_by_name=True, hide_input_in_errors=True
    )

    model: Any = Field(default=None, repr=False, exclude=True)
    """A hub name, a local folder, ``demo`` (the bundled model), or a loaded model."""
    engine_source: Any = Field(default="auto", alias="engine", repr=False, exclude=True)
    """An engine, or the kind to open: ``auto``, ``transformers``, ``vllm``, a server's URL."""
    tokenizer: Any = Field(default=None, repr=False, exclude=True)
    """The model's own by default; must be given with a loaded model."""
    blend_config: InstanceOf[BlendConfig] | None = None
    """How stored KV is fused, or a dict of its fields; the engine's own by default."""
    instruction: str | InstanceOf[BasePromptTemplate[Any]] | None = Field(default=None, repr=False)
    """What prompts say before their first passage, or the prompt template, which tells it."""
    namespace: str = "default"
    """Tenants with different namespaces share neither KV nor known chunks."""
    kv_path: str | Path | None = Field(default=None, repr=False, exclude=True)
    """A folder that keeps chunk KV and known chunks; None keeps them in this process' memory."""
    host_bytes: int = Field(default=4 << 30, ge=0)
    """Memory for chunk KV."""
    disk_bytes: int | None = None
    """Room for chunk KV in ``kv_path``; None is without limit."""
    device: str | None = None
    dtype: str | None = None
    api_key: SecretStr | None = Field(
        default_factory=secret_from_env("CACHEBLEND_API_KEY", default=None), exclude=True
    )
    """What a server asks for; the environment variable CACHEBLEND_API_KEY by default."""

    _opened: Engine | None = PrivateAttr(default=None)

    def __init__(self, **options: Any) -> None:
        named = _arguments(type(self)).read(options)
        try:
            super().__init__(**named)
        except ValidationError as error:
            raise ConfigError(describe(error.errors(include_input=False))) from None

    @field_validator("blend_config", mode="before")
    @classmethod
    def _read_config(cls, given: Any) -> Any:
        return BlendConfig.from_dict(given) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        _check_engine(self.engine_source)
        if isinstance(self.engine_source, str):
            _check_model(self.model, self.engine_source)
            return self
        defaults = type(self).model_fields
        idle = sorted(n for n in SETTLED_BY_ENGINE if getattr(self, n) != defaults[n].default)
        if idle:
            raise ConfigError(f"{', '.join(idle)}: already settled by the engine given as engine=")
        return self

    def __getstate__(self) -> dict[Any, Any]:
        """Leave key and engine out of pickles; where they are opened, both are had anew."""
        if not isinstance(self.engine_source, str):
            raise ConfigError(
                "an open engine cannot be pickled: give model= and kv_path= instead of engine="
            )
        state = super().__getstate__()
        private = {**(state["__pydantic_private__"] or {}), "_opened": None}
        kept = {**state["__dict__"], "api_key": None}
        return {**state, "__dict__": kept, "__pydantic_private__": private}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy everything but the engine and a loaded model, which copies share."""
        shared = (self.engine_source, self._opened, self.model, self.tokenizer)
        return super().__deepcopy__({**(memo or {}), **{id(part): part for part in shared}})

    @property
    def engine(self) -> Engine:
        """The engine, opened on first use.

        Raises ModelLoadError, MissingExtraError, EngineUnavailableError or ConfigError, each with
        one line that says what to change.
        """
        if not isinstance(self.engine_source, str):
            given: Engine = self.engine_source
            return given
        if self._opened is not None:
            return self._opened
        with _opening:
            if self._opened is None:
                self._opened = self._open(self.engine_source)
            return self._opened

    @property
    def is_open(self) -> bool:
        """Whether the engine is there already, so that its instruction is settled."""
        return self._opened is not None or not isinstance(self.engine_source, str)

    @property
    def model_name(self) -> str:
        """The model's hub name, or its folder's own name; a server alone is asked for it."""
        if not isinstance(self.engine_source, str):
            return str(self.engine_source.model_name)
        if not self.model:
            return str(self.engine.model_name)
        name = str(self.model if isinstance(self.model, str | Path) else self.model.name_or_path)
        return public_name(name) or "model"

    @property
    def engine_identity(self) -> str:
        """A hash that differs wherever model, precision, instruction or namespace do.

        Opens nothing unless a loaded model, or a server alone, was given. It holds no path, URL or
        secret.
        """
        if not isinstance(self.engine_source, str) or not isinstance(self.model, str | Path):
            return self.engine.fingerprint
        parts = (
            self.engine_source,
            str(self.model),
            self.dtype,
            self.namespace,
            repr(self.instruction),
            repr(self.blend_config),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _open(self, source: str) -> Engine:
        instruction: str | Callable[[Any], str] = ""
        if isinstance(self.instruction, BasePromptTemplate):
            instruction = partial(prompt_instruction, self.instruction)
        elif self.instruction:
            instruction = self.instruction
        return open_engine(
            source,
            model=self.model or "",
            tokenizer=self.tokenizer,
            config=self.blend_config,
            instruction=instruction,
            namespace=self.namespace,
            kv_path=self.kv_path,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
            device=self.device,
            dtype=self.dtype,
            api_key=Secret.of(self.api_key.get_secret_value() if self.api_key else None),
        )


@cache
def _arguments(options: type[EngineOptions]) -> Arguments:
    """Return the names that a class takes, by field and by alias."""
    names = {name for field, info in options.model_fields.items() for name in (field, info.alias)}
    known = frozenset(name for name in names if name)
    inside = dict.fromkeys(CONFIG_FIELDS - known, "blend_config")
    return Arguments(f"option of {options.__name__}", known, inside)


def _check_engine(engine: Any) -> None:
    if isinstance(engine, str):
        check_engine_name(engine, ENGINES)
    elif isinstance(engine, EngineOptions):
        raise ConfigError(f"engine is a {type(engine).__name__}: give the engine of it, llm.engine")
    elif not all(hasattr(engine, name) for name in ENGINE_METHODS):
        raise ConfigError(
            f"engine is a {type(engine).__name__}: give an open engine, such as llm.engine, "
            f"or {', '.join(ENGINES)} or a server's URL"
        )


def _check_model(model: Any, engine: str) -> None:
    if model in (None, ""):
        if "://" in engine:
            return  # the server says what it loaded
        raise ConfigError("give model= (a name, a folder, 'demo', a loaded model) or engine=")
    if isinstance(model, EngineOptions):
        raise ConfigError(f"model is a {type(model).__name__}: give engine=llm.engine")
    if not isinstance(model, str | Path) and not hasattr(model, "name_or_path"):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a name, a folder, 'demo' or a loaded model"
        )
