"""The parameters of the installed benchmarks (``cacheblend-rag bench NAME``)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cacheblend_rag.bench.gpu.steps import STEP_NAMES
from cacheblend_rag.bench.plan import (
    DEFAULT_SHAPE,
    REQUIRED,
    SHAPES_HELP,
    ModelPlan,
    Plan,
    option,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.plain import read_object
from cacheblend_rag.settings import Precision
from cacheblend_rag.settings.tier_url import TierUrl

if TYPE_CHECKING:
    from cacheblend_rag.bench.gpu.scene import Scene
    from cacheblend_rag.bench.named_model import NamedModel
    from cacheblend_rag.bench.shapes import ModelShape
    from cacheblend_rag.bench.vllm import VLLMSetting
    from cacheblend_rag.report import BlendReport
    from cacheblend_rag.settings import BlendConfig

ENGINES = ("transformers", "vllm", "vllm-server")
TIERS = ("host", "disk")
"""Tiers that need no server; any other is given by its URL."""
TIERS_HELP = "host, disk or a tier's URL, such as redis://cache:6379/0; repeatable."
OPTIONS = '{"alone": true}'
"""An example of ``selector_options``, for help and error messages."""
VLLM_BATCHED_TOKENS = 2048
"""vLLM's default of max_num_batched_tokens."""


@dataclass(frozen=True, kw_only=True)
class BlendPlan(ModelPlan):
    """A benchmark whose prompts are chunks and a question, with one selector."""

    chunk_tokens: int = option(512, "Tokens a chunk.", least=1)
    question_tokens: int = option(32, "Tokens behind the chunks.", least=1)
    selector: str = option("hkvd", "The selector.")
    selector_options: str = option("", f"Its options, as a JSON object, such as {OPTIONS}.")
    check_layers: tuple[int, ...] = option(
        (1,), "Where hkvd compares, separated by commas.", comma=True
    )

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.model_shape.layers

    @cached_property
    def options(self) -> dict[str, Any]:
        """The selector's options; raises ConfigError unless they are a JSON object."""
        return read_object("selector_options", self.selector_options, OPTIONS)

    def blend_config(self, ratio: float) -> BlendConfig:
        """Return the config of a blend at ``ratio``; raises ConfigError if it cannot be run."""
        from cacheblend_rag.blend import plan_schedule
        from cacheblend_rag.settings import BlendConfig

        config = BlendConfig(
            recompute_ratio=ratio,
            check_layers=self.check_layers,
            selector=self.selector,
            selector_options=self.options,
            min_tokens=0,
            reuse_prefix=False,
        )
        plan_schedule(config, self.layers)
        return config


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
class TtftPlan(BlendPlan):
    """Time to first token: every tier at every ratio, ``repeat`` times each, medians reported.

    model: by its name, with its own weights and on real text; "" is random weights of ``shape``.
    batched_tokens: None is the whole prompt. memory: whether peak memory is measured, too. Raises
    ModelLoadError when there is no such model.
    """

    shape: str = option("", f"Of random weights: {SHAPES_HELP} {DEFAULT_SHAPE} by default.")
    model: str = option(
        "",
        "In place of a shape: a model's own weights, on real text. smollm2, a folder, a GGUF file "
        "or a hub name.",
    )
    engine: str = option(ENGINES[0], f"{', '.join(ENGINES)}.")
    chunks: int = option(8, "Chunks in the prompt.", least=1)
    ratios: tuple[float, ...] = option((0.15,), "Recompute ratio; repeatable.", flag="--ratio")
    tiers: tuple[str, ...] = option(
        TIERS,
        "host, disk or a tier's URL, such as redis://cache:6379/0; repeatable.",
        flag="--tier",
    )
    repeat: int = option(5, "Timed runs each; medians are shown.", least=1)
    batched_tokens: int | None = option(
        None, "Most tokens vLLM computes in a step; whole prompts by default.", least=1
    )
    eager: bool = option(False, "vLLM without compiling the model.")
    attention: str = option("auto", "Of recomputed rows in vLLM: auto, native, sdpa or flex.")
    precision: Precision = option("native", "Of stored chunk KV: native, fp8 or int8.")
    neighbours: int = option(
        0, "Other processes that compute meanwhile, each on one thread.", least=0
    )
    cold: bool = option(False, "Drop the disk's files from the page cache before each blend.")
    memory: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model and self.shape:
            raise ConfigError(
                f"shape={self.shape!r} and model={self.model!r} exclude each other: give one"
            )
        if self.engine not in ENGINES:
            raise ConfigError(f"engine={self.engine!r} must be one of {', '.join(ENGINES)}")
        from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings

        ConnectorSettings.of(
            {"store": {"precision": self.precision}, "attention": self.attention}
        )  # raises for an unknown name
        for tier in self.tiers:
            check_tier(tier)
        can_be_cold = self.engine == ENGINES[0] and hasattr(os, "posix_fadvise")
        if self.cold and ("disk" not in self.tiers or not can_be_cold):
            raise ConfigError("cold=True: only for --tier disk, --engine transformers, on Linux")
        self.subject.check_prompt(self.prompt_tokens)
        for ratio in self.ratios:
            self.blend_config(ratio)

    @cached_property
    def subject(self) -> ModelShape | NamedModel:
        """What is measured."""
        if not self.model:
            return self.model_shape
        from cacheblend_rag.bench.named_model import NamedModel

        return NamedModel.of(self.model)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.subject.layers

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt; of real text about so many."""
        return self.chunks * self.chunk_tokens + self.question_tokens

    @cached_property
    def setting(self) -> VLLMSetting:
        """The model and how vLLM runs it."""
        from cacheblend_rag.bench.vllm import VLLMSetting

        return VLLMSetting(self.subject, self.torch_dtype, self.torch_device, self.eager)

    def step_tokens(self, prompt_tokens: int) -> int:
        """Most tokens vLLM computes in a step: its default, or what holds the prompt if longer."""
        return self.batched_tokens or max(VLLM_BATCHED_TOKENS, prompt_tokens)

    def blend_config(self, ratio: float) -> BlendConfig:
        """As of any plan; what is measured is a blend, however slow."""
        return super().blend_config(ratio).with_changes(cost_model=False)

    def bound(self, ratio: float, tokens: PromptTokens | None = None) -> float:
        """Return the largest speedup the computed tokens allow: full prefill's work by the blend's.

        Work is counted as tokens x layers: all tokens up to and at the (first) check layer, and
        what is no chunk with the ratio's share of the chunks in the rest. Selectors that choose
        before layer 0 have no such first part; those that ask the question pay its probe pass.
        tokens: of the prompt, as planned by default.
        """
        from cacheblend_rag.blend.selectors import make_selector

        if tokens is None:
            chunks = self.chunks * self.chunk_tokens
            tokens = PromptTokens(self.prompt_tokens, chunks, self.question_tokens)
        selector = make_selector(self.selector, self.options)
        question = tokens.question / tokens.prompt
        kept = 1 - (1 - ratio) * tokens.chunks / tokens.prompt
        if 0 < ratio < 1 and selector.needs_fresh_kv:
            whole = (self.check_layers[0] + 1) / self.layers
            return 1 / (whole + (1 - whole) * kept)
        asks = 0 < ratio < 1 and selector.needs_question
        probe = selector.probe.depth(self.layers) / self.layers if asks else 0.0
        return 1 / (kept + probe * question)


@dataclass(frozen=True, kw_only=True)
class ThroughputPlan(BlendPlan):
    """Questions per second in vLLM: ``questions`` questions, each over ``drawn`` of the chunks."""

    questions: int = option(64, "Questions, all sent at once.", least=1)
    chunks: int = option(40, "Chunks to draw from.", least=1)
    drawn: int = option(6, "Chunks a question draws.", least=1)
    answer_tokens: int = option(8, "Tokens an answer.", least=1)
    ratio: float = option(0.15, "Recompute ratio.")
    seed: int = option(7, "Draws chunks and questions.")
    eager: bool = option(False, "vLLM without compiling the model.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drawn(self.drawn, self.chunks)
        if self.prompt_tokens + self.answer_tokens > self.model_shape.max_positions:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} must leave room for the answer in "
                f"{self.model_shape.max_positions}, the positions of {self.shape}"
            )
        self.blend_config(self.ratio)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.drawn * self.chunk_tokens + self.question_tokens

    @cached_property
    def setting(self) -> VLLMSetting:
        """The model and how vLLM runs it."""
        from cacheblend_rag.bench.vllm import VLLMSetting

        return VLLMSetting(self.model_shape, self.torch_dtype, self.torch_device, self.eager)


@dataclass(frozen=True, kw_only=True)
class SteadyPlan(BlendPlan):
    """Requests that never repeat, each over ``drawn`` of the chunks, from memory and disk."""

    requests: int = option(1000, "Requests, no two alike.", least=1)
    chunks: int = option(200, "Stored chunks.", least=1)
    drawn: int = option(4, "Chunks a request draws.", least=1)
    chunk_tokens: int = option(96, "Tokens a chunk.", least=1)
    question_tokens: int = option(16, "Tokens behind the chunks.", least=1)
    exponent: float = option(1.0, "Of Zipf's law.", least=0)
    held: float = option(0.25, "Share of the chunks that memory holds.")
    full_every: int = option(1, "Every so many requests ordinary prefill, too.", least=1)
    ratio: float = option(0.15, "Recompute ratio.")
    seed: int = option(7, "Draws chunks and questions.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drawn(self.drawn, self.chunks)
        if not 0 < self.held < 1:
            raise ConfigError(f"held={self.held} must be between 0 and 1: memory is the smaller")
        if self.full_every > HUNDRED:
            raise ConfigError(f"full_every={self.full_every} must be at most {HUNDRED}")
        self.model_shape.check_prompt(self.prompt_tokens)
        self.blend_config(self.ratio)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt."""
        return self.drawn * self.chunk_tokens + self.question_tokens

    @property
    def host_bytes(self) -> int:
        """Memory for the share of the chunks that the host tier holds."""
        chunk = self.model_shape.kv_bytes(self.chunk_tokens, self.torch_dtype)
        return chunk * round(self.held * self.chunks)


@dataclass(frozen=True, kw_only=True)
class ConversationPlan(Plan):
    """Time to first token in each turn of a conversation, and how near its answers are.

    Every turn has ``passages`` new passages, which stay in the prompt in their turn. Beyond
    ``prompt_tokens`` the oldest turns are dropped.
    """

    model: str = option("smollm2", "The model: a name, a folder or a hub name.")
    turns: int = option(12, "Turns.", least=1)
    passages: int = option(4, "New passages a turn.", least=1)
    passage_tokens: int = option(300, "Tokens a passage.", least=1)
    answer_tokens: int = option(48, "Tokens an answer.", least=1)
    prompt_tokens: int = option(6000, "Longest prompt: the oldest turns are dropped.", least=1)
    skip_undropped: bool = option(False, "Leave out the table with nothing dropped.")
    seed: int = option(7, "Draws passages and questions.")
    prefix_bytes: int = 2 << 30


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Plan):
    """A batch of requests over chunks drawn by Zipf's law, by overlap and by arrival.

    All chunks are on disk; memory has room for ``held`` of them.
    """

    model: str = option("smollm2", "The model: a name, a folder or a hub name.")
    requests: int = option(64, "Requests of the batch.", least=1)
    chunks: int = option(200, "Stored chunks.", least=1)
    drawn: int = option(4, "Chunks a request draws.", least=1)
    chunk_tokens: int = option(128, "Tokens a chunk.", least=1)
    exponent: float = option(1.0, "Of Zipf's law.", least=0)
    held: float = option(0.08, "Share of the stored bytes that memory has room for.", least=0)
    answer_tokens: int = option(8, "Tokens an answer.", least=1)
    ratio: float = option(0.15, "Recompute ratio.")
    repeat: int = option(3, "Runs in each order; medians are shown.", least=1)
    seed: int = option(7, "Draws passages and requests.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drawn(self.drawn, self.chunks)
        from cacheblend_rag.settings import BlendConfig

        BlendConfig(recompute_ratio=self.ratio)  # raises for a ratio that is none


HUNDRED = 100
"""Requests summed up in one row of `SteadyPlan`'s benchmark."""


@dataclass(frozen=True, kw_only=True)
class StorePlan(Plan):
    """How fast a chunk of so many MiB goes into each tier and comes out."""

    chunk_mib: int = option(64, "Size of the chunk KV moved.", least=1)
    repeat: int = option(7, "Timed runs each.", least=1)
    tiers: tuple[str, ...] = option(
        TIERS,
        "host, disk or a tier's URL, such as redis://cache:6379/0; repeatable.",
        flag="--tier",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for tier in self.tiers:
            check_tier(tier)


@dataclass(frozen=True, kw_only=True)
class GpuPlan(Plan):
    """Everything about a GPU that decides how much sooner blends are.

    toy: tiny shapes in place of ``shape``, on the CPU too.
    """

    out: str = option(REQUIRED, "File that gets the result as JSON, anew after each step.")
    shape: str = option("llama-3.1-8b", "As in `bench ttft`; smaller ones fit smaller GPUs.")
    steps: tuple[str, ...] = option(
        (), f"Run only this step: {', '.join(STEP_NAMES)}; repeatable.", flag="--step"
    )
    toy: bool = option(False, "Tiny shapes, without a GPU too: tries the command.", flag="--toy")

    def __post_init__(self) -> None:
        super().__post_init__()
        for step in self.steps:
            if step not in STEP_NAMES:
                raise ConfigError(f"step={step!r} must be one of {', '.join(STEP_NAMES)}")

    def scene(self) -> Scene:
        """Return what is measured on; raises ConfigError for an unknown shape."""
        from cacheblend_rag.bench.gpu.scene import Dimensions, Scene
        from cacheblend_rag.bench.shapes import TOY, named_shape

        shape = TOY if self.toy else named_shape(self.shape)
        return Scene(self.toy, Dimensions.of(shape))


def check_tier(tier: str) -> None:
    """Raise ConfigError for what is neither the name of a tier without server nor a tier's URL."""
    if tier in TIERS:
        return
    if "://" not in tier:
        raise ConfigError(f"tier={tier!r} must be host, disk or a tier's URL")
    TierUrl(tier)


def check_drawn(drawn: int, chunks: int) -> None:
    """Raise ConfigError for more chunks drawn than there are."""
    if drawn > chunks:
        raise ConfigError(f"drawn={drawn} must be at most chunks={chunks}")
