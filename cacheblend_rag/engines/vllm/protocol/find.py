"""What a request may say about finding chunks in its prompt, in ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.engines.vllm.protocol.job import PARAMETER, VERSION
from cacheblend_rag.errors import ConfigError

FIND = "find"
OFF = "off"
OFF_PARAMS: Mapping[str, Any] = {PARAMETER: {"version": VERSION, "kind": OFF}}
"""What a request says whose prompt is not to be searched: ordinary prefill answers it."""


@dataclass(frozen=True)
class FindJob:
    """A request's own wish about chunks in its prompt.

    wanted: whether they are searched for. config: settings of a BlendConfig, as plain JSON values;
    those that are missing are the server's.
    """

    wanted: bool
    config: Mapping[str, Any]

    def to_params(self) -> dict[str, Any]:
        """Return plain JSON values for ``kv_transfer_params``."""
        if not self.wanted:
            return dict(OFF_PARAMS)
        return {PARAMETER: {"version": VERSION, "kind": FIND, "config": dict(self.config)}}

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> FindJob | None:
        """Read a wish; None if there is none, or a job of another kind.

        Raises ConfigError when it is malformed.
        """
        sent = (params or {}).get(PARAMETER)
        if not isinstance(sent, Mapping) or sent.get("kind") not in (FIND, OFF):
            return None
        if sent.get("version") != VERSION:
            raise ConfigError(f"{PARAMETER}.version must be {VERSION}")
        config = sent.get("config", {})
        if not isinstance(config, Mapping):
            raise ConfigError(f"{PARAMETER}.config must be an object")
        return cls(sent["kind"] == FIND, config)
