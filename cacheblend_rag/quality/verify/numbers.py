"""Checks of what is computed: positions, exactness, stored KV and precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.loading import is_quantized
from cacheblend_rag.engines.transformers.prefill import ContinuationScore
from cacheblend_rag.engines.transformers.trial import same_logits
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.dataset import EvalQuestion, PromptFrame
from cacheblend_rag.quality.fidelity import divergences, reference
from cacheblend_rag.quality.rules import ALWAYS
from cacheblend_rag.quality.verify.check import Check
from cacheblend_rag.quality.verify.wording import lead_tokens
from cacheblend_rag.settings import BlendConfig
from cacheblend_rag.text.prompt import BlendPrompt

POSITIONS = Check("positions", "compares layer 0's KV, moved to the prompt, with that of prefill")
EXACTNESS = Check("exactness", "compares recompute_ratio=1 with full prefill")
STORED = Check("stored KV", "reuses a first passage, whose KV is full prefill's own")
PRECISION = Check("precision", "compares dtypes, looks for NaN, measures noise and rounding")

LEAST_TOLERANCE, KEY_STEPS = 2e-3, 4.0
"""Largest difference of a token's key or value, relative to its size; or, if that is more, so many
units in the last place."""
MOST_ROUNDING = -math.log(0.95)
"""KL in nats of a model from itself by rounding: above it no setting could be told from noise."""
MOST_NOISE = 1e-3
"""KL in nats of a model from itself when the same is computed again; kernels may add in any order.
"""
ONE = BlendConfig(recompute_ratio=1.0, **ALWAYS)
REUSE = BlendConfig(recompute_ratio=0.0, selector="none", **ALWAYS)


@dataclass(frozen=True)
class Prompted:
    """One prompt on one engine, with what full prefill predicts for its own answer.

    engine: its store holds the KV of the question's documents.
    """

    engine: TransformersEngine
    frame: PromptFrame
    question: EvalQuestion

    @cached_property
    def prompt(self) -> BlendPrompt:
        """The prompt, with its passages as chunks."""
        return self.frame.prompt(self.question)

    @cached_property
    def answer(self) -> tuple[int, ...]:
        """Full prefill's greedy answer."""
        return reference(self.engine, self.prompt).answer

    @cached_property
    def wanted(self) -> Tensor:
        """Full prefill's log-probabilities, (tokens, vocabulary) float32."""
        return self.full().log_probs

    @cached_property
    def one_by_one(self) -> Tensor:
        """The same of a part of the answer at a time: other numbers of rows round differently."""
        parts = [self.answer[:end] for end in range(1, len(self.answer) + 1)]
        scores = self.engine.score_each(self.prompt, parts, full=True)
        return torch.stack([score.log_probs[-1] for score in scores])

    def full(self) -> ContinuationScore:
        """Score the answer after full prefill."""
        return self.engine.score(self.prompt, self.answer, full=True)

    def blended(self, config: BlendConfig) -> ContinuationScore:
        """Score the answer after a blend."""
        return self.engine.score(self.prompt, self.answer, config=config)

    def compare(self, asked: Check, score: ContinuationScore, remedy: str) -> Check:
        """Return whether a score is that of full prefill, but for rounding."""
        if not score.report.blended:
            return asked.failed(f"nothing was reused: {score.report.reason}", remedy)
        off = (score.log_probs - self.wanted).abs().nan_to_num(math.inf).max()
        measured = {
            "kl": float(divergences(self.wanted, score.log_probs).mean()),
            "largest_difference": float(off),
            "reused_tokens": score.report.reused_tokens,
        }
        model = self.engine.model
        quantized = is_quantized(model)
        if same_logits(score.log_probs, self.wanted, model.dtype, quantized=quantized):
            return asked.ok(f"the same but for rounding, KL {measured['kl']:.1e}", measured)
        return asked.failed(f"KL {measured['kl']:.3g} is more than rounding", remedy, measured)


def check_positions(prompted: Prompted) -> Check:
    """Check that every reused token has the key and the value that prefill computes there.

    In layer 0 both depend on the token and its position alone, whatever stands before it. The
    other layers' rotary embeddings were compared when the model was loaded.
    """
    engine, prompt = prompted.engine, prompted.prompt
    *found, reused = _first_layer(engine, prompt, REUSE)
    *wanted, _ = _first_layer(engine, prompt, None)
    keys, values = (_off(here, there) for here, there in zip(found, wanted, strict=True))
    measured = {"keys_off": keys, "values_off": values, "reused_tokens": reused}
    if not reused:
        return POSITIONS.failed("nothing was reused", "see the other checks", measured)
    tolerance = max(LEAST_TOLERANCE, KEY_STEPS * torch.finfo(found[0].dtype).eps)
    if max(keys, values) <= tolerance:
        told = f"{reused:,} reused tokens stand where they belong"
        return POSITIONS.ok(f"{told}, off by {max(keys, values):.1e}", measured)
    what = "keys" if keys > tolerance else "values"
    remedy = "the model's rotary embedding is not what its config says: report the model"
    told = f"reused {what} are off by {max(keys, values):.2g}, not {tolerance:.1g} at most"
    return POSITIONS.failed(told, remedy, measured)


def _first_layer(
    engine: TransformersEngine, prompt: BlendPrompt, config: BlendConfig | None
) -> tuple[Tensor, Tensor, int]:
    """Prefill a prompt, ordinarily without a config; return layer 0's keys and values.

    Both are (kv_heads, tokens, head_dim), keys rotated. At last, how many tokens were reused.
    """
    greedy = SamplingParams.greedy(max_tokens=1)
    request = engine._request(prompt, greedy, config, full=config is None)
    _, prefilled = engine._run(request, engine._prefilled(request))
    if not isinstance(prefilled.cache, FusedCache):
        raise ConfigError("the KV of a prompt is known of models that can be blended only")
    fused, tokens = prefilled.cache.fused, len(request.prepared.token_ids)
    told = engine._report(request, prefilled.report).reused_tokens
    return fused.keys[0, :, :tokens].clone(), fused.values[0, :, :tokens].clone(), told


def _off(found: Tensor, wanted: Tensor) -> float:
    """Return the largest relative difference of a token, over (kv_heads, tokens, head_dim)."""
    size = wanted.float().norm(dim=(0, 2))
    off = (found.float() - wanted.float()).norm(dim=(0, 2)) / size.clamp(min=1e-6)
    return float(off.nan_to_num(math.inf).max())


def check_exactness(prompted: Prompted) -> Check:
    """Check that a blend that recomputes everything is full prefill."""
    remedy = "report the model: its layers, run by this package, differ from the model's own"
    return prompted.compare(EXACTNESS, prompted.blended(ONE), remedy)


def check_stored(prompted: Prompted) -> Check:
    """Check that a first passage's stored KV is what full prefill computes, in every layer.

    prompted: its engine computes chunks after the instruction, which is the prompt's beginning, so
    that reuse must be exact.
    """
    engine, question = prompted.engine, prompted.question
    first = question.passages[0]
    opening, rest = prompted.frame.opening, prompted.prompt.text
    rest = rest[len(opening) + len(first.text) :]
    parts = [part for part in (opening, first, rest) if part != ""]
    alone = replace(BlendPrompt.of(*parts), is_rendered=prompted.frame.is_rendered)
    prepared = replace(engine.prepare(alone), found=())  # other passages are computed, too
    encoded, lead = prepared.encoded, lead_tokens(engine)
    span = next(iter(encoded.spans), None)
    if span is None or span.before or encoded.token_ids[: span.start] != lead:
        return STORED.skipped("the first passage is computed after other tokens than it stands at")
    remedy = "report the model; until then do not blend it"
    return prompted.compare(STORED, engine.score(prepared, prompted.answer, config=REUSE), remedy)


def check_precision(prompted: Prompted, checkpoint: torch.dtype | None) -> Check:
    """Check dtypes and noise. checkpoint: the dtype of the model's weights on disk, if known."""
    engine = prompted.engine
    measured = _noise_figures(prompted)
    for wrong, remedy in _wrong_precisions(prompted, checkpoint, measured):
        return PRECISION.failed(wrong, remedy, measured)
    told = f"{engine.dtype}, KV too; KL by rounding {measured['rounding_kl']:.1e}"
    return PRECISION.ok(told, measured)


def _noise_figures(prompted: Prompted) -> dict[str, float]:
    again, rounded = prompted.full().log_probs, prompted.one_by_one
    return {
        "repeat_kl": _finite(divergences(prompted.wanted, again).mean()),
        "rounding_kl": _finite(divergences(prompted.wanted, rounded).mean()),
    }


def _finite(value: Tensor) -> float:
    return float(value.nan_to_num(1e9, posinf=1e9))


def _wrong_precisions(
    prompted: Prompted, checkpoint: torch.dtype | None, measured: dict[str, float]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, with the remedy."""
    model = prompted.engine.model
    if not prompted.wanted.isfinite().all():
        yield f"the model computes NaN or infinity in {model.dtype}", "use float32 or bfloat16"
    if checkpoint == torch.bfloat16 and model.dtype == torch.float16:
        yield (
            "the weights are bfloat16 and run in float16, whose largest number is 65,504",
            "use --dtype bfloat16 or float32",
        )
    stored = _stored_dtypes(prompted) - {model.dtype}
    if stored:
        names = ", ".join(map(str, stored))
        yield f"stored KV is {names}, the model is {model.dtype}", "recompute the stored KV"
    if measured["repeat_kl"] > MOST_NOISE:
        yield (
            f"two full prefills of one prompt differ, KL {measured['repeat_kl']:.2g}",
            "switch off whatever adds noise, such as dropout",
        )
    if measured["rounding_kl"] > MOST_ROUNDING:
        yield (
            f"rounding alone changes predictions, KL {measured['rounding_kl']:.2g}",
            "use a higher precision, such as --dtype float32",
        )


def _stored_dtypes(prompted: Prompted) -> set[torch.dtype]:
    engine = prompted.engine
    keys = [engine.key(passage) for passage in prompted.question.passages]
    found = [lookup.kv for lookup in engine.store.get_many(keys)]
    return {kv.dtype for kv in found if kv is not None}
