"""``verify``: whether a model can be blended in production, by checks on a small set of prompts.

What the trial at loading says, each layer alone and at other positions, is its first check of KV;
the others are records of the measuring loop, held against bars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor

from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries, whole_config
from cacheblend_rag.engines.prepare import PromptLike
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.loading import stated_dtype
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.quality.evaluate import reuse, rule_of
from cacheblend_rag.quality.fidelity import Fidelity
from cacheblend_rag.quality.measure import (
    BLEND_ALWAYS,
    FULL,
    Measured,
    Prompt,
    Rule,
    measure,
    stored,
)
from cacheblend_rag.quality.questions import over_passages
from cacheblend_rag.quality.wording import (
    Check,
    check_seams,
    check_template,
    check_tokenizer,
    lead_tokens,
)
from cacheblend_rag.settings import EMBEDDED, BlendConfig, EngineConfig
from cacheblend_rag.text.chunk import Document
from cacheblend_rag.text.prompt import BlendPrompt

QUESTIONS, PASSAGES = 6, 4
"""Of the packaged set: how many, and passages of each."""
BLENDING, PRECISION, POSITIONS, EXACTNESS, STORED, FIDELITY = (
    "blending", "precision", "positions", "exactness", "stored KV", "fidelity",
)  # fmt: skip
OF_KV = (PRECISION, POSITIONS, EXACTNESS, STORED, FIDELITY)
FORBIDS = (BLENDING, POSITIONS, EXACTNESS, STORED, FIDELITY)
"""Checks whose failure means that the model should not be blended; others can be put right."""

MOST_NOISE = 1e-3
"""KL in nats of a model from itself when the same is computed again; kernels may add in any order.
"""
MOST_KL = 0.25
"""Mean KL, in nats, that a model may lose on the small set: predictions keep 78 % likelihood."""
LEAST_TOLERANCE, KEY_STEPS = 2e-3, 4.0
"""Largest difference of a token's key or value, relative to its size; or, if that is more, so many
units in the last place."""
NEGLIGIBLE = 1e-3
"""A divergence so small that plain reuse cannot be told from it."""
AGAIN, NAN = Rule("again"), "the model computes NaN or infinity"


@dataclass(frozen=True)
class Verdict:
    """All checks of a model.

    Args:
        model: its public name.
        engine: the kind of engine that ran it.
        dtype: in what precision.
        device: where.
        checks: in the order in which they were made.
    """

    model: str
    engine: str
    dtype: str
    device: str
    checks: Sequence[Check]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def advice(self) -> str:
        """One line: whether to blend this model."""
        if self.passed:
            return "blend this model"
        names = ", ".join(check.name for check in self.failed)
        if any(check.name in FORBIDS for check in self.failed):
            return f"do not blend this model: it failed {names}"
        return f"put this right before you blend this model: {names}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        about = {name: getattr(self, name) for name in ("model", "engine", "dtype", "device")}
        result = {"passed": self.passed, "advice": self.advice}
        return {**about, **result, "checks": [asdict(check) for check in self.checks]}


def verify_model(
    model: str,
    *,
    data: EvalDataset | None = None,
    config: EngineConfig | None = None,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Verdict:
    """Return the verdict on a model, which is loaded into the embedded engine and checked.

    Args:
        model: as for open_engine.
        data: the questions; a packaged set for None.
        config: the engine's other settings, whose fidelity is checked.
        on_check: called with each result.

    Raises:
        ModelLoadError: when the model cannot be loaded.
        PromptError: when a question does not fit its context window.
    """
    quiet_libraries()
    data = data or sample_questions()
    opening = frame_of(load_tokenizer(model), data).opening
    own = (config or EngineConfig()).with_changes(engine=EMBEDDED, model=model, instruction=opening)
    with closing(cast(TransformersEngine, open_engine(own))) as engine:
        stated = stated_dtype(whole_config(model))
        return verify_engine(engine, data, checkpoint=stated, on_check=on_check)


def frame_of(tokenizer: object, data: EvalDataset) -> PromptFrame:
    """Return the prompts' frame; plain text if the chat template drops what the user says."""
    try:
        return PromptFrame.of(tokenizer, data.instruction)
    except ConfigError:
        return PromptFrame.of(tokenizer, data.instruction, chat_template=False)


def sample_questions() -> EvalDataset:
    """Return packaged questions over paragraphs of Wikipedia.

    Each question gets the paragraph that answers it behind some others.
    """
    sample, questions = load_passages(), []
    documents = sample.documents()
    for asked in sample.questions[:QUESTIONS]:
        at = [document.document_id for document in documents].index(asked.title)
        own, *others = [*documents[at:], *documents[:at]][:PASSAGES]
        questions.append(over_passages(asked.question, asked.answers, (*others, own)))
    return EvalDataset("packaged", tuple(questions))


def verify_engine(
    engine: TransformersEngine,
    data: EvalDataset,
    *,
    checkpoint: torch.dtype | None = None,
    on_check: Callable[[Check], None] = lambda check: None,
) -> Verdict:
    """Check the model of an embedded engine.

    Args:
        engine: its instruction is the opening of ``frame_of``'s prompts.
        data: the questions.
        checkpoint: the dtype of the model's weights on disk, if known.
        on_check: called with each result.

    Raises:
        PromptError: when a question does not fit the context window.
    """
    found = []
    for check in _checks(engine, data, checkpoint):
        on_check(check)
        found.append(check)
    return Verdict(
        engine.model_name, engine.name, engine.dtype, str(engine.model.device), tuple(found)
    )


def _checks(
    engine: TransformersEngine, data: EvalDataset, checkpoint: torch.dtype | None
) -> Iterator[Check]:
    frame, questions = frame_of(engine.tokenizer, data), data.questions
    yield check_template(engine.tokenizer, data)
    yield check_tokenizer(engine.tokenizer, questions)
    yield check_seams(engine, frame, questions)
    if engine.blend_refusal is not None:
        remedy = "it is served by ordinary prefill: choose another model to blend"
        yield Check(BLENDING, "failed", str(engine.blend_refusal), remedy)
        yield from (Check(name, "skipped", "the model cannot be blended") for name in OF_KV)
        return
    yield Check(BLENDING, "ok", "every layer gives its result in the model, at other positions too")
    base, lead_in = engine.config, engine.lead_in.kind
    own = Rule("own", base.with_changes(**BLEND_ALWAYS), lead_in)
    every, plain = rule_of("all", 1.0, BlendConfig(), lead_in), reuse(BlendConfig(), "instruction")
    prompts = [frame.to_measure(question) for question in questions]
    (first,) = measure(engine, prompts[:1], [FULL, AGAIN, every], warm=False)
    precision = check_precision(engine.model.dtype, checkpoint, first)
    yield precision
    if precision.found == NAN:
        yield from (Check(name, "skipped", NAN) for name in OF_KV[1:])
        return
    yield check_positions(engine, prompts[0])
    yield check_exact(EXACTNESS, first[every.name])
    yield check_stored(engine, frame, questions[0], plain)
    found = list(measure(engine, prompts, [FULL, own, plain], warm=False))
    recomputes = base.selector != "none" and base.ratio > 0
    yield check_fidelity(
        *([_compared(one[rule.name]) for one in found] for rule in (own, plain)),
        recomputes=recomputes,
    )


def check_precision(
    dtype: torch.dtype, checkpoint: torch.dtype | None, found: dict[str, Measured]
) -> Check:
    """Check dtypes and noise. checkpoint: of the model's weights on disk, if it is known."""
    gold, noise = _compared(found[FULL.name]).gold_logprob, _compared(found[AGAIN.name]).kl
    if gold is not None and not math.isfinite(gold):
        return Check(PRECISION, "failed", NAN, "use --set dtype=float32 or bfloat16")
    if checkpoint == torch.bfloat16 and dtype == torch.float16:
        wrong = "the weights are bfloat16 and run in float16, whose largest number is 65,504"
        return Check(PRECISION, "failed", wrong, "use --set dtype=bfloat16 or float32")
    if noise > MOST_NOISE:
        wrong = f"two full prefills of one prompt differ, KL {noise:.2g}"
        return Check(PRECISION, "failed", wrong, "switch off whatever adds noise, such as dropout")
    told = f"{dtype}; the same computed again differs by KL {noise:.1e}"
    return Check(PRECISION, "ok", told, measured={"repeat_kl": noise})


def check_exact(name: str, found: Measured) -> Check:
    """Check that the answer of a rule that is exact by construction is full prefill's."""
    why, compared = found.record.not_blended, _compared(found)
    kl = compared.kl
    if why:
        return Check(name, "failed", f"nothing was reused: {why}", "see the other checks")
    if compared.exact:
        told = f"the same but for rounding, KL {kl:.1e}"
        return Check(name, "ok", told, measured={"kl": kl})
    remedy = "report the model; if it runs in half precision, try --set dtype=float32 first"
    return Check(name, "failed", f"KL {kl:.3g} is more than rounding", remedy, {"kl": kl})


def check_stored(
    engine: TransformersEngine, frame: PromptFrame, question: EvalQuestion, plain: Rule
) -> Check:
    """Check that a first passage's stored KV is what full prefill computes, in every layer.

    plain: reuses what was computed after the instruction, which is the prompt's beginning.
    """
    document = Document("first", (question.passages[0].text,))
    (first,), text = document.to_chunks(), frame.prompt(question).text
    rest = text[len(frame.opening) + len(first.text) :]
    parts = [part for part in (frame.opening, first, rest) if part != ""]
    asked = replace(BlendPrompt.of(*parts), is_rendered=frame.is_rendered)
    encoded, lead = engine.prepare(asked).encoded, lead_tokens(engine)
    span = next(iter(encoded.spans), None)
    if span is None or span.before or encoded.token_ids[: span.start] != lead:
        why = "the first passage is computed after other tokens than it stands at"
        return Check(STORED, "skipped", why)
    prompt = Prompt(asked, (document,), question.answers)
    (found,) = measure(engine, [prompt], [FULL, plain], warm=False)
    return check_exact(STORED, found[plain.name])


def check_fidelity(
    blends: Sequence[Fidelity], reuses: Sequence[Fidelity], *, recomputes: bool
) -> Check:
    """Check that an engine's own settings are near full prefill, and what they recompute helps.

    reuses: of plain reuse, after the instruction alone.
    """
    kl, plain = mean(one.kl for one in blends), mean(one.kl for one in reuses)
    same = mean(float(one.same_answer or 0) for one in blends)
    measured = {"prompts": len(blends), "kl": kl, "kl_plain_reuse": plain, "same_answers": same}
    told = f"mean KL {kl:.3f} on {len(blends)} prompts, plain reuse {plain:.3f}"
    if not kl <= MOST_KL:
        remedy = f"keep to ordinary prefill, or `tune` a profile that stays below {MOST_KL}"
        return Check(FIDELITY, "failed", f"{told}: more than {MOST_KL}", remedy, measured)
    if recomputes and kl >= plain and kl > NEGLIGIBLE:
        remedy = "recomputing does not help this model: `tune` it, or keep to ordinary prefill"
        return Check(FIDELITY, "failed", f"{told}: no better than that", remedy, measured)
    return Check(FIDELITY, "ok", f"{told}; {same:.0%} of answers the same", measured=measured)


def _compared(one: Measured) -> Fidelity:
    return one.record.fidelity or Fidelity(math.inf)


def check_positions(engine: TransformersEngine, prompt: Prompt) -> Check:
    """Check that every reused token has the key and the value that prefill computes there.

    In layer 0 both depend on the token and its position alone, whatever stands before it.
    """
    plain = BlendConfig(selector="none", recompute_ratio=0.0, **BLEND_ALWAYS)
    with stored(engine, prompt):
        *found, reused = _first_layer(engine, prompt.asked, plain)
    *wanted, _ = _first_layer(engine, prompt.asked, None)
    off = max(_off(here, there) for here, there in zip(found, wanted, strict=True))
    measured = {"off": off, "reused_tokens": reused}
    most = max(LEAST_TOLERANCE, KEY_STEPS * torch.finfo(found[0].dtype).eps)
    if not reused:
        return Check(POSITIONS, "failed", "nothing was reused", "see the other checks", measured)
    if off <= most:
        told = f"{reused:,} reused tokens stand where they belong, off by {off:.1e}"
        return Check(POSITIONS, "ok", told, measured=measured)
    remedy = "the model's rotary embedding is not what its config says: report the model"
    told = f"reused keys or values are off by {off:.2g}, not {most:.1g} at most"
    return Check(POSITIONS, "failed", told, remedy, measured)


def _first_layer(
    engine: TransformersEngine, prompt: PromptLike, config: BlendConfig | None
) -> tuple[Tensor, Tensor, int]:
    """Prefill a prompt, ordinarily without a config; return layer 0's keys and values.

    Both are (kv_heads, tokens, head_dim), keys rotated. At last, how many tokens were reused.
    """
    greedy = SamplingParams.greedy(max_tokens=1)
    request = engine._request(prompt, greedy, config, full=config is None)
    _, prefilled = engine._run(request, engine._prefilled(request))
    fused, tokens = cast(FusedCache, prefilled.cache).fused, len(request.prepared.token_ids)
    reused = engine._report(request, prefilled.report).reused_tokens
    return fused.keys[0, :, :tokens].clone(), fused.values[0, :, :tokens].clone(), reused


def _off(found: Tensor, wanted: Tensor) -> float:
    """Return the largest relative difference of a token, over (kv_heads, tokens, head_dim)."""
    size = wanted.float().norm(dim=(0, 2))
    off = (found.float() - wanted.float()).norm(dim=(0, 2)) / size.clamp(min=1e-6)
    return float(off.nan_to_num(math.inf).max())
