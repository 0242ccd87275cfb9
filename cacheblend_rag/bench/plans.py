"""The parameters of ``cacheblend-rag bench ttft``.

PyTorch is not imported before a plan is made, so that the command line starts quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import Precision, StoreConfig
from cacheblend_rag.settings.options import read_object
from cacheblend_rag.settings.tier_url import TierUrl

if TYPE_CHECKING:
    import torch

    from cacheblend_rag.bench.shapes import ModelShape, NamedModel
    from cacheblend_rag.report import BlendReport
    from cacheblend_rag.settings import BlendConfig

DEFAULT_SHAPE = "smollm2-135m"
ENGINES = ("transformers", "vllm", "vllm-server")
TIERS = ("host", "disk")
"""Tiers that need no server; any other is given by its URL."""
OPTIONS = '{"layers": [9, 12]}'
"""An example of ``selector_options``, for help and error messages."""
VLLM_BATCHED_TOKENS = 2048
"""vLLM's default of max_num_batched_tokens."""


@dataclass(frozen=True)
class PromptTokens:
    """Numbers of tokens in a prompt, as an engine's report gives them.

    chunks: those whose KV is stored. question: those behind the last chunk.
    """

    prompt: int
    chunks: int
    question: int

    @classmethod
    def of(cls, report: BlendReport) -> PromptTokens:
        """Count the tokens of a prompt that was blended, from its report."""
        behind = max(chunk.start + chunk.tokens for chunk in report.chunks)
        chunks = sum(chunk.tokens for chunk in report.chunks)
        return cls(report.prompt_tokens, chunks, report.prompt_tokens - behind)


@dataclass(frozen=True, kw_only=True)
class TtftPlan:
    """Time to first token: every tier at every ratio, ``repeat`` times each, medians reported.

    shape: of random weights, a name in `SHAPES`; DEFAULT_SHAPE if neither it nor a model is given.
    model: by its name, with its own weights and on real text. dtype, device: of random weights.
    selector_options: as a JSON object. batched_tokens: most that vLLM computes in a step, None is
    the whole prompt. eager: vLLM without compiling the model. Raises ConfigError for what cannot be
    measured, ModelLoadError when there is no such model.
    """

    shape: str = ""
    model: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    engine: str = ENGINES[0]
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    selector: str = "hkvd"
    selector_options: str = ""
    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.15,)
    tiers: tuple[str, ...] = TIERS
    repeat: int = 5
    batched_tokens: int | None = None
    eager: bool = False
    precision: Precision = "native"

    def __post_init__(self) -> None:
        if self.model and self.shape:
            raise ConfigError(
                f"shape={self.shape!r} and model={self.model!r} exclude each other: give one"
            )
        if self.engine not in ENGINES:
            raise ConfigError(f"engine={self.engine!r} must be one of {', '.join(ENGINES)}")
        StoreConfig(precision=self.precision)  # raises for an unknown name
        for tier in self.tiers:
            check_tier(tier)
        self.subject.check_prompt(self.prompt_tokens)
        for ratio in self.ratios:
            self.blend_config(ratio)

    @cached_property
    def model_shape(self) -> ModelShape:
        """The dimensions of random weights; raises ConfigError for an unknown name."""
        from cacheblend_rag.bench.shapes import named_shape

        return named_shape(self.shape or DEFAULT_SHAPE)

    @cached_property
    def subject(self) -> ModelShape | NamedModel:
        """What is measured."""
        if not self.model:
            return self.model_shape
        from cacheblend_rag.bench.shapes import NamedModel

        return NamedModel.of(self.model)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The data type called ``dtype``; raises ConfigError for an unknown name."""
        from cacheblend_rag.engines.transformers.loading import named_dtype

        return named_dtype(self.dtype)

    @cached_property
    def torch_device(self) -> torch.device:
        """The torch device named by ``device``; raises ConfigError if it is not available."""
        from cacheblend_rag.engines.transformers.loading import pick_device

        return pick_device(self.device)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The selector's options; raises ConfigError unless they are a JSON object."""
        return read_object("selector_options", self.selector_options, OPTIONS)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.subject.layers

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt; of real text about so many."""
        return self.chunks * self.chunk_tokens + self.question_tokens

    def step_tokens(self, prompt_tokens: int) -> int:
        """Most tokens vLLM computes in a step: its default, or what holds the prompt if longer."""
        return self.batched_tokens or max(VLLM_BATCHED_TOKENS, prompt_tokens)

    def blend_config(self, ratio: float) -> BlendConfig:
        """Return the config of a blend at ``ratio``, however slow.

        Raises ConfigError if it cannot be run.
        """
        from cacheblend_rag.blend import plan_schedule
        from cacheblend_rag.settings import BlendConfig

        config = BlendConfig(
            recompute_ratio=ratio,
            check_layers=self.check_layers,
            selector=self.selector,
            selector_options=self.options,
            min_tokens=0,
            reuse_prefix=False,
            cost_model=False,
        )
        plan_schedule(config, self.layers)
        return config

    def bound(self, ratio: float, tokens: PromptTokens | None = None) -> float:
        """Return the largest speedup the computed tokens allow: full prefill's work by the blend's.

        Work is counted as tokens x layers: all tokens up to and at the (first) check layer, and
        what is no chunk with the ratio's share of the chunks in the rest. Selectors that choose
        before layer 0 have no such first part; those that ask the question pay its probe pass.
        tokens: of the prompt, as planned by default.
        """
        from cacheblend_rag.blend.selectors import Question, make_selector

        if tokens is None:
            chunks = self.chunks * self.chunk_tokens
            tokens = PromptTokens(self.prompt_tokens, chunks, self.question_tokens)
        selector = make_selector(self.selector, self.options)
        question = tokens.question / tokens.prompt
        kept = 1 - (1 - ratio) * tokens.chunks / tokens.prompt
        if 0 < ratio < 1 and selector.needs_fresh_kv:
            whole = (self.check_layers[0] + 1) / self.layers
            return 1 / (whole + (1 - whole) * kept)
        probe = 0.0
        if 0 < ratio < 1 and isinstance(selector, Question):
            probe = (selector.observed(self.layers)[-1] + 1) / self.layers
        return 1 / (kept + probe * question)


def check_tier(tier: str) -> None:
    """Raise ConfigError for what is neither the name of a tier without server nor a tier's URL."""
    if tier in TIERS:
        return
    if "://" not in tier:
        raise ConfigError(f"tier={tier!r} must be host, disk or a tier's URL")
    TierUrl(tier)
