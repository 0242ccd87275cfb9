"""Settings of two lifetimes: a request's (BlendConfig), and an engine's (all the others)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.options import Arguments, check_engine_name
from cacheblend_rag.settings.secret import Secret
from cacheblend_rag.settings.sizes import read_bytes, read_seconds
from cacheblend_rag.settings.tier_url import TierUrl, passwords, read_tiers

logger = logging.getLogger(__name__)

LeadInKind = Literal["none", "bos", "instruction", "document"]
Preset = Literal["quality", "balanced", "speed"]
Precision = Literal["native", "fp8", "int8"]

PRESET_RATIOS: Mapping[str, float] = {"quality": 0.25, "balanced": 0.16, "speed": 0.10}
RATIO_BOUNDS = (0.05, 0.30)
AUTO, EMBEDDED, VLLM = "auto", "transformers", "vllm"
ENGINES = (AUTO, EMBEDDED, VLLM)
"""Kinds of engine that go by a name; a server goes by its URL."""


def names_of(settings: type[Any]) -> frozenset[str]:
    """Return the names of the fields of some settings."""
    return frozenset(one.name for one in fields(settings))


class Settings:
    """What all settings can do; a subclass is a frozen dataclass that checks its fields."""

    _noun: ClassVar[str] = "setting"
    """What a field is, as an error calls it."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return settings made of plain values (JSON, TOML).

        Raises:
            ConfigError: for a name that is none of them, or a value out of range.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"settings are a {type(values).__name__}: give names with values")
        return cls(**Arguments(cls._noun, names_of(cls)).read(values))

    @classmethod
    def of(cls, value: Self | Mapping[str, Any] | None) -> Self:
        """Return settings as they are, from plain values, or the defaults for None."""
        if value is None:
            return cls()
        return value if isinstance(value, cls) else cls.from_dict(value)  # type: ignore[arg-type]

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced, validated again."""
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True)
class LeadInConfig(Settings):
    """What an engine computes chunks behind, which is settled for its lifetime.

    Args:
        kind: ``none``, ``bos``, ``instruction`` or ``document`` (contextual chunk KV).
        document_window: tokens of its own document a chunk is precomputed behind, at most.
        split_special_tokens: what looks like a special token in a chunk is encoded as the text that
            it is, so that passages cannot speak as the system.

    Raises:
        ConfigError: when a field is out of range.
    """

    _noun: ClassVar[str] = "setting of a lead-in"

    kind: LeadInKind = "document"
    document_window: int = 2048
    split_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(LeadInKind):
            raise ConfigError(
                f"lead_in={self.kind!r} must be one of {', '.join(get_args(LeadInKind))}"
            )
        _check_int("document_window", self.document_window, 1)
        _check_flag("split_special_tokens", self.split_special_tokens)

    @classmethod
    def of(cls, value: LeadInConfig | Mapping[str, Any] | str | None) -> Self:
        """As for all settings; a string is the kind."""
        return cls(kind=value) if isinstance(value, str) else super().of(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StoreConfig(Settings):
    """Where an engine keeps chunk KV.

    Sizes and times may be given as text, such as ``"8GiB"`` and ``"12h"``.

    Args:
        kv_path: folder for chunk KV and the registry of known chunks, shared between processes and
            runs; None keeps both in this process' memory.
        host_bytes: memory for chunk KV, in each process that computes; None is without limit, 0
            keeps none there.
        disk_bytes: room for chunk KV in ``kv_path``; None is without limit.
        ttl_seconds: age since it was first stored at which a chunk is gone; None is never.
        tiers: where chunk KV is kept, fastest first, as URLs: ``host://?capacity=8GiB``,
            ``disk:///folder``, ``redis://host:6379/0``, ``s3://bucket/prefix``, ...; None is
            memory and ``kv_path``. With it ``kv_path`` keeps the registry alone. A password in a
            URL is in no representation, and in nothing that is serialized.
        read_only: serve from what others store: nothing outside of this process' memory is written,
            evicted, set aside or marked as used.
        access_log: regular file in which is noted, in lines of JSON, which stored chunks prompts
            ask for. A store that is opened with one that is there brings the most used of them into
            its fastest tier, in the background.
        precision: of the numbers that are stored: ``native`` as computed, ``fp8`` or ``int8`` a
            byte each. Chunks of one precision are not found by engines of another.

    Raises:
        ConfigError: when a field is out of range.
    """

    _noun: ClassVar[str] = "setting of a store"

    kv_path: str | None = None
    host_bytes: int | None = 4 << 30
    disk_bytes: int | None = None
    ttl_seconds: float | None = None
    tiers: tuple[str, ...] | None = None
    read_only: bool = False
    access_log: str | None = None
    precision: Precision = "native"

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise ConfigError(f"precision={self.precision!r:.100} must be one of {known}")
        object.__setattr__(self, "read_only", _flag("read_only", self.read_only))
        if self.kv_path is not None:
            _check_path("kv_path", self.kv_path)
            object.__setattr__(self, "kv_path", os.fspath(self.kv_path))
        if self.access_log is not None:
            _check_path("access_log", self.access_log, "a file")
            object.__setattr__(self, "access_log", os.fspath(self.access_log))
        for name in ("host_bytes", "disk_bytes"):
            object.__setattr__(self, name, read_bytes(name, getattr(self, name)))
        object.__setattr__(self, "ttl_seconds", read_seconds("ttl_seconds", self.ttl_seconds))
        object.__setattr__(self, "tiers", read_tiers(self.tiers))
        self._check_tiers()

    @property
    def outlives(self) -> bool:
        """Whether chunk KV outlives the process, or is shared with others."""
        if self.tiers is None:
            return self.kv_path is not None
        return any(url.outlives for url in self.urls)

    @property
    def urls(self) -> tuple[TierUrl, ...]:
        """The tiers, as read."""
        return tuple(TierUrl(url) for url in self.tiers or ())

    def environment(self) -> dict[str, str]:
        """Return the passwords of tiers as variables, for the environment of a worker process."""
        return passwords(self.urls)

    @classmethod
    def spread(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with what a whole ``store`` among them tells by its own names.

        Raises:
            ConfigError: for a setting that is given beside ``store``, too.
        """
        given = dict(options)
        store = given.pop("store", None)
        if store is None:
            return given
        if loose := names_of(cls) & given.keys():
            raise ConfigError(f"{', '.join(sorted(loose))}: give it as a setting of store=, too")
        return {**given, **cls.of(store).to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; passwords stay here, see ``environment``."""
        plain = asdict(self)
        return plain if self.tiers is None else {**plain, "tiers": [str(u) for u in self.tiers]}

    def _check_tiers(self) -> None:
        """Raise ConfigError where memory or disk is told twice."""
        if self.tiers is None:
            return
        for name, scheme in (("host_bytes", "host://"), ("disk_bytes", "disk:///folder")):
            if getattr(self, name) != getattr(type(self), name):
                raise ConfigError(
                    f"{name} beside tiers: give {scheme}?capacity=... as one of tiers instead"
                )


@dataclass(frozen=True)
class BlendConfig(Settings):
    """How one request's cached chunk KV is fused.

    Args:
        recompute_ratio: share of chunk tokens recomputed, 0 (plain reuse) to 1 (ordinary prefill);
            ``auto`` is the largest whose recompute takes no longer than loading the chunks does.
        ratio_bounds: the smallest and the largest ratio that ``auto`` may choose.
        check_layers: layers at which a selector that needs fresh KV compares it with cached KV;
            ignored by selectors that choose rows before layer 0.
        recompute_ratios: one ratio a check layer, never rising; None uses recompute_ratio for all.
        selector: name of the rule that ranks tokens (see ``cacheblend_rag.blend.selectors``).
        selector_options: the selector's own fields, such as ``{"deviation": "k"}`` for ``hkvd``.
        min_tokens: prompts with fewer reusable chunk tokens are served by ordinary prefill.
        protect_context: never recompute tokens of a contextual chunk whose own document context is
            absent from the prompt, since fresh KV would forget it. Off at ratio 1.
        cost_model: compute a chunk, or the whole prompt, where that is measured to be sooner than
            loading and blending. Off: what is stored is blended however long that takes, so that
            comparisons of quality and benchmarks do not turn on how busy the machine is.
        trace: put into the report which tokens were chosen, by which scores. It costs a little: an
            accelerator is read back from, and vLLM computes such a request anew each time.
        lead_in, document_window, split_special_tokens: an engine's, not a request's: they live in
            LeadInConfig now. An engine that is opened with them takes them over and says so.

    Raises:
        ConfigError: when a field is out of range.
    """

    recompute_ratio: float | Literal["auto"] = PRESET_RATIOS["balanced"]
    check_layers: tuple[int, ...] = (1,)
    recompute_ratios: tuple[float, ...] | None = None
    selector: str = "hkvd"
    selector_options: Mapping[str, Any] = field(default_factory=dict)
    min_tokens: int = 256
    protect_context: bool = True
    cost_model: bool = True
    ratio_bounds: tuple[float, float] = RATIO_BOUNDS
    trace: bool = False
    lead_in: LeadInKind | None = None
    document_window: int | None = None
    split_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "check_layers", _list("check_layers", self.check_layers))
        if self.recompute_ratios is not None:
            ratios = _list("recompute_ratios", self.recompute_ratios)
            object.__setattr__(self, "recompute_ratios", ratios)
        object.__setattr__(self, "selector_options", _options(self.selector_options))
        self._check_ratios()
        _check_layers(self.check_layers)
        if self.recompute_ratios is not None:
            _check_schedule(self.recompute_ratios, self.check_layers)
        if not isinstance(self.selector, str) or not self.selector:
            raise ConfigError(f"selector={self.selector!r} must be a selector's name")
        _check_int("min_tokens", self.min_tokens, 0)
        _check_flag("protect_context", self.protect_context)
        _check_flag("cost_model", self.cost_model)
        _check_flag("trace", self.trace)
        self.lead_in_config()

    def _check_ratios(self) -> None:
        object.__setattr__(self, "ratio_bounds", _list("ratio_bounds", self.ratio_bounds))
        if len(self.ratio_bounds) != 2 or self.ratio_bounds[0] > self.ratio_bounds[-1]:
            raise ConfigError(f"ratio_bounds={self.ratio_bounds} must be two ratios that rise")
        for ratio in self.ratio_bounds:
            _check_ratio("ratio_bounds", ratio)
        if self.recompute_ratio != AUTO:
            _check_ratio("recompute_ratio", self.recompute_ratio, f' or "{AUTO}"')
        elif self.recompute_ratios is not None:
            raise ConfigError(f'recompute_ratio="{AUTO}" chooses: leave recompute_ratios out')

    @classmethod
    def preset(cls, name: Preset, **overrides: Any) -> BlendConfig:
        """Return the preset ``quality`` (0.25), ``balanced`` (0.16) or ``speed`` (0.10).

        Args:
            name: which preset.
            **overrides: other fields, by name.

        Raises:
            ConfigError: when there is no such preset, or a field is out of range.
        """
        if name not in PRESET_RATIOS:
            raise ConfigError(f"preset={name!r} must be one of {', '.join(PRESET_RATIOS)}")
        return cls(**{"recompute_ratio": PRESET_RATIOS[name], **overrides})

    def to_dict(self) -> dict[str, Any]:
        """Return a request's settings as plain JSON values."""
        plain: dict[str, Any] = asdict(self)
        return {name: value for name, value in plain.items() if name not in _LEAD_IN_FIELDS}

    def lead_in_config(self) -> LeadInConfig | None:
        """Return what is an engine's among these settings, None where nothing is."""
        given = {own: getattr(self, name) for name, own in _LEAD_IN_FIELDS.items()}
        given = {name: value for name, value in given.items() if value is not None}
        return LeadInConfig(**given) if given else None

    def for_requests(self) -> BlendConfig:
        """Return a copy without what is an engine's."""
        return self.with_changes(**dict.fromkeys(_LEAD_IN_FIELDS))

    def with_ratio(self, recompute_ratio: float) -> BlendConfig:
        """Return a copy with one ratio, in force after every check layer."""
        return self.with_changes(recompute_ratio=recompute_ratio, recompute_ratios=None)

    @property
    def ratio(self) -> float:
        """The recompute ratio; the largest that may be chosen where that is left to the engine."""
        chosen = self.recompute_ratio
        return self.ratio_bounds[1] if isinstance(chosen, str) else chosen

    def ratio_at(self, check: int) -> float:
        """Return the recompute ratio in force after the ``check``-th check layer."""
        return self.ratio if self.recompute_ratios is None else self.recompute_ratios[check]


_LEAD_IN_FIELDS: Mapping[str, str] = {
    "lead_in": "kind",
    "document_window": "document_window",
    "split_special_tokens": "split_special_tokens",
}
"""Fields of BlendConfig that moved, and what LeadInConfig calls them."""


def check_namespace(namespace: object) -> None:
    """Raise ConfigError unless a namespace is a text that can be hashed and stored.

    Half of a character (a lone surrogate) cannot be: it stands for bytes of a command line that
    are no UTF-8, for instance.
    """
    if not isinstance(namespace, str):
        raise ConfigError(f"namespace={namespace!r:.100} must be a name")
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"namespace={namespace!r:.100} holds half of a character: give text in UTF-8"
        ) from error


def settle(
    blend: BlendConfig | None, lead_in: LeadInConfig | Mapping[str, Any] | str | None
) -> tuple[BlendConfig, LeadInConfig]:
    """Return an engine's default for requests and its lead-in, each in its own settings.

    Raises:
        ConfigError: when both arguments tell of the lead-in, and not the same.
    """
    blend = BlendConfig.of(blend)
    moved = blend.lead_in_config()
    if moved is None:
        return blend, LeadInConfig.of(lead_in)
    if lead_in is not None and LeadInConfig.of(lead_in) != moved:
        raise ConfigError("lead_in= and BlendConfig(lead_in=...) differ: give lead_in= alone")
    logger.warning(
        "a lead-in is an engine's and lives in LeadInConfig: give the engine lead_in=%r in place "
        "of BlendConfig(lead_in=..., document_window=..., split_special_tokens=...)",
        moved,
    )
    return blend.for_requests(), moved


def check_request(blend: BlendConfig) -> BlendConfig:
    """Return a request's config; raises ConfigError where it tells what is an engine's."""
    given = [name for name in _LEAD_IN_FIELDS if getattr(blend, name) is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)} in a request's config: chunks are stored behind one lead-in, so "
            "give the engine lead_in=LeadInConfig(...)"
        )
    return blend


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Which engine serves, and all that is settled when it is opened.

    Args:
        engine: ``transformers`` (embedded), ``vllm`` (in this process), the URL of a server that
            ``cacheblend-rag serve`` started, or ``auto``.
        model: a name (``smollm2``, ``demo``, a GGUF file, a folder in hub format, a hub name) or a
            loaded model (embedded engine only). With a URL it names the tokenizer, and "" takes
            what the server loaded.
        tokenizer: the model's own by default; must be given with a loaded model.
        instruction: what prompts say before their first chunk; lead-ins compute chunks behind it.
            A function is given the model's tokenizer and returns it.
        namespace: tenants with different namespaces share neither KV nor known chunks.
        blend: of requests that bring no config of their own.
        lead_in: what chunks are computed behind.
        store: where their KV is kept; a server has a store of its own, and only the registry in
            ``kv_path`` is used with a URL.
        fill_on_miss: compute registered chunks whose KV a request missed, and store it, when no
            request waits. Off by default: it works on after a call has returned, on a model that
            its owner may be using, and into a store that may be shared.
        device, dtype: where and how precise the model runs; a server has settled both.
        api_key: what a server asks for, the environment's CACHEBLEND_API_KEY by default; it is in
            no representation, and in nothing that is serialized.

    Raises:
        ConfigError: when a field is out of range.
    """

    _noun: ClassVar[str] = "option of an engine"

    engine: str = AUTO
    model: Any = ""
    tokenizer: Any = field(default=None, repr=False)
    instruction: str | Callable[[Any], str] = ""
    namespace: str = "default"
    blend: BlendConfig = field(default_factory=BlendConfig)
    lead_in: LeadInConfig = field(default_factory=LeadInConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    fill_on_miss: bool = False
    device: str | None = None
    dtype: Any = None
    api_key: Secret | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_engine_name(self.engine, ENGINES)
        check_namespace(self.namespace)
        if not (isinstance(self.instruction, str) or callable(self.instruction)):
            raise ConfigError(f"instruction={self.instruction!r:.100} must be a text")
        _check_flag("fill_on_miss", self.fill_on_miss)
        lead_in = LeadInConfig.of(self.lead_in)
        named = None if lead_in == LeadInConfig() else lead_in
        blend, lead_in = settle(self.blend, named)
        object.__setattr__(self, "blend", blend)
        object.__setattr__(self, "lead_in", lead_in)
        object.__setattr__(self, "store", StoreConfig.of(self.store))
        object.__setattr__(self, "api_key", Secret.of(self.api_key))

    @classmethod
    def gather(cls, **options: Any) -> Self:
        """Return the settings that options tell, a store's given by their own names, too.

        Raises:
            ConfigError: for an option that is none, and for one that is given twice.
        """
        inside = names_of(StoreConfig)
        given = StoreConfig.spread(Arguments(cls._noun, names_of(cls) | inside).read(options))
        store = {name: given.pop(name) for name in inside & given.keys()}
        return cls(**given, store=StoreConfig(**store))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without the key.

        Raises:
            ConfigError: where a model, a tokenizer or an instruction is given that is no text.
        """
        for name, value in (("model", self.model), ("instruction", self.instruction)):
            if not isinstance(value, str | Path):
                raise ConfigError(f"{name} is a {type(value).__name__}: only texts are serialized")
        if self.tokenizer is not None:
            raise ConfigError("tokenizer is given: only the model's own is had anew")
        return {
            "engine": self.engine,
            "model": os.fspath(self.model),
            "instruction": self.instruction,
            "namespace": self.namespace,
            "blend": self.blend.to_dict(),
            "lead_in": asdict(self.lead_in),
            "store": self.store.to_dict(),
            "fill_on_miss": self.fill_on_miss,
            "device": self.device,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return settings made of plain values; nested ones may be such, too.

        Raises:
            ConfigError: for a name that is none of them, or a value out of range.
        """
        nested: dict[str, type[Settings]] = {
            "blend": BlendConfig, "lead_in": LeadInConfig, "store": StoreConfig
        }  # fmt: skip
        read = {n: nested[n].of(v) if n in nested else v for n, v in dict(values).items()}
        return super().from_dict(read)


def _list(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!r:.100} must be a list of numbers")
    return tuple(value)


def _options(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"selector_options={value!r:.100} must be an object of named values")
    return dict(value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r:.100} must be true or false")


def _flag(name: str, value: object) -> bool:
    """Return a flag, which a command line gives as a text."""
    read = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    _check_flag(name, value if read is None else read)
    return bool(read)


def _check_ratio(name: str, value: object, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name}={value!r} must be a number from 0 to 1{otherwise}")


def _check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {low}")


def _check_layers(layers: tuple[int, ...]) -> None:
    if not layers:
        raise ConfigError("check_layers=() must name at least one layer")
    for layer in layers:
        _check_int("check_layers", layer, 0)
    if any(b <= a for a, b in pairwise(layers)):
        raise ConfigError(f"check_layers={layers} must rise strictly")


def _check_schedule(ratios: tuple[float, ...], layers: tuple[int, ...]) -> None:
    if len(ratios) != len(layers):
        raise ConfigError(
            f"recompute_ratios={ratios} must hold one ratio for each of check_layers={layers}"
        )
    for ratio in ratios:
        _check_ratio("recompute_ratios", ratio)
    if any(b > a for a, b in pairwise(ratios)):
        raise ConfigError(f"recompute_ratios={ratios} must not rise: rows are only ever dropped")


def _check_path(name: str, value: object, what: str = "a folder") -> None:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{name}={value!r:.100} must be {what}")
