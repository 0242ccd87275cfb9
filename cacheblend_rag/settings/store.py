"""StoreConfig: where an engine keeps chunk KV."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, InstanceOf, model_validator

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import Bytes, Flag, Seconds, Settings
from cacheblend_rag.settings.options import Precision
from cacheblend_rag.settings.tier_url import TierUrl, read_tiers


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


FilledText = Annotated[str, Field(min_length=1)]
Path = Annotated[FilledText | None, BeforeValidator(_path)]
Tiers = Annotated[tuple[InstanceOf[str], ...] | None, BeforeValidator(read_tiers)]


class StoreConfig(Settings):
    """Where an engine keeps chunk KV.

    Sizes and times may be given as text, such as ``"8GiB"`` and ``"12h"``. A password in a tier's
    URL is never printed or serialized.
    """

    _noun: ClassVar[str] = "setting of a store"

    kv_path: Path = None
    """Folder for chunk KV and the registry of known chunks, shared between processes and runs;
    None keeps both in this process' memory."""
    host_bytes: Bytes | None = 4 << 30
    """Memory for chunk KV, in each process that computes; None is without limit, 0 keeps no chunk
    in memory."""
    disk_bytes: Bytes | None = None
    """Room for chunk KV in ``kv_path``; None is without limit."""
    ttl_seconds: Seconds | None = None
    """Time after which a chunk expires, counted from when it was first stored; None is never."""
    tiers: Tiers = None
    """Where chunk KV is kept, fastest first, as URLs: ``host://?capacity=8GiB``,
    ``disk:///folder``, ``redis://host:6379/0``, ``s3://bucket/prefix``, ...; None is memory and
    ``kv_path``. With tiers, ``kv_path`` holds only the registry."""
    read_only: Flag = False
    """Only read what others store: nothing outside this process's memory is written, evicted,
    quarantined or marked as used."""
    precision: Precision = "native"
    """Precision of stored KV: ``native`` as computed, ``fp8`` 8 bits per number,
    ``int4`` 4 bits and scales. Engines do not find chunks of another precision."""

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        """Raise ConfigError if memory or disk is given twice."""
        if self.tiers is None:
            return self
        for name, scheme in (("host_bytes", "host://"), ("disk_bytes", "disk:///folder")):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(
                    f"{name} beside tiers: give {scheme}?capacity=... as one of tiers instead"
                )
        return self

    @property
    def outlives(self) -> bool:
        """Whether chunk KV outlives the process, or is shared with others."""
        if self.tiers is None:
            return self.kv_path is not None
        return any(url.outlives for url in self.urls)

    @property
    def urls(self) -> tuple[TierUrl, ...]:
        """The tiers, parsed."""
        return tuple(TierUrl(url) for url in self.tiers or ())

    def environment(self) -> dict[str, str]:
        """Return the passwords of tiers as environment variables for a worker process."""
        secrets = ((url.variable, url.password) for url in self.urls)
        return {name: secret.get_secret_value() for name, secret in secrets if secret}

    @classmethod
    def gather(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with a whole ``store`` in place of a store's settings among them.

        Raises:
            ConfigError: for a setting that is given beside ``store``, too.
        """
        given = dict(options)
        inside = {name: given.pop(name) for name in options if name in cls.model_fields}
        if not inside:
            return given
        if given.get("store") is not None:
            raise ConfigError(f"{', '.join(sorted(inside))}: give it as a setting of store=, too")
        return {**given, "store": cls(**inside)}
