"""``verify``: whether a model can be blended in production, by checks on a few prompts.

The trial at loading says whether each layer can be run alone, and its keys moved to other
positions. The other checks say what it does not: whether the chat template, the precision, whole
answers and stored KV are right, and how far the engine's settings are from full prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any, Literal, cast

import torch

from cacheblend_rag.demo.passages import QUESTIONS, load_passages
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries, whole_config
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.loading import stated_dtype
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.quality.evaluate import reuse, rule_of
from cacheblend_rag.quality.fidelity import Fidelity
from cacheblend_rag.quality.measure import BLEND_ALWAYS, FULL, Measured, Rule, measure
from cacheblend_rag.quality.questions import over_passages
from cacheblend_rag.settings import EMBEDDED, BlendConfig, EngineConfig
from cacheblend_rag.text.chat import begins_as_rendered, render_chat
from cacheblend_rag.text.chunk import Document
from cacheblend_rag.text.encoder import encode_plainly

PASSAGES = 4
"""Of each packaged question."""
TEMPLATE, PRECISION, BLENDING, EXACTNESS, STORED, FIDELITY = (
    "template", "precision", "blending", "exactness", "stored KV", "fidelity",
)  # fmt: skip
CAN_BE_PUT_RIGHT = (TEMPLATE, PRECISION)
"""The other checks' failure means that the model should not be blended."""
MOST_KL = 0.25
"""Mean KL, in nats, that a model may lose on the small set: predictions keep 78 % likelihood."""
NEGLIGIBLE = 1e-3
"""A divergence so small that plain reuse cannot be told from it."""


@dataclass(frozen=True)
class Check:
    """One check of a model, with its result.

    Args:
        name: short and unique.
        status: ``ok``, ``failed`` or ``skipped``.
        found: what was found, or why it was skipped.
        remedy: what to do about a failure.
        measured: figures by name; KL is in nats, shares are from 0 to 1.
    """

    name: str
    status: Literal["ok", "failed", "skipped"]
    found: str
    remedy: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)


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
        if all(check.name in CAN_BE_PUT_RIGHT for check in self.failed):
            return f"put this right before you blend this model: {names}"
        return f"do not blend this model: it failed {names}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "passed": self.passed, "advice": self.advice}


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
    """Return packaged questions over paragraphs of Wikipedia, the one with the answer last."""
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
    yield check_template(engine.tokenizer, data)
    yield check_precision(engine.model.dtype, checkpoint)
    if engine.blend_refusal is not None:
        remedy = "it is served by ordinary prefill: choose another model to blend"
        yield Check(BLENDING, "failed", str(engine.blend_refusal), remedy)
        for name in (EXACTNESS, STORED, FIDELITY):
            yield Check(name, "skipped", "the model cannot be blended")
        return
    yield Check(BLENDING, "ok", "every layer gives its result in the model, at other positions too")
    base, lead_in, frame = engine.config, engine.lead_in.kind, frame_of(engine.tokenizer, data)
    own = Rule("own", base.with_changes(**BLEND_ALWAYS), lead_in)
    every, plain = rule_of("all", 1.0, BlendConfig(), lead_in), reuse(BlendConfig(), "instruction")
    prompts = [frame.to_measure(question) for question in data.questions]
    (first,) = measure(engine, prompts[:1], [FULL, every], warm=False)
    yield check_exact(EXACTNESS, first[every.name])
    yield check_stored(engine, frame, data.questions[0], plain)
    found = list(measure(engine, prompts, [FULL, own, plain], warm=False))
    yield check_fidelity(
        *([_compared(one[rule.name]) for one in found] for rule in (own, plain)),
        recomputes=base.selector != "none" and base.ratio > 0,
    )


def check_template(tokenizer: Any, data: EvalDataset) -> Check:
    """Check that a chat template leaves every text as it is and where it belongs."""
    if not getattr(tokenizer, "chat_template", None):
        return Check(TEMPLATE, "skipped", "there is no chat template: prompts are plain text")
    question = data.questions[0]
    asked = "\n\n".join([*(one.text for one in question.passages), question.question])
    turns = {
        "the instruction": {"role": "system", "content": data.instruction},
        "the user's message": {"role": "user", "content": asked},
        "an answer": {"role": "assistant", "content": "beta two"},
        "a later message": {"role": "user", "content": "gamma three"},
    }
    remedy = "set tokenizer.chat_template to the one the model came with"
    try:
        told = render_chat(list(turns.values()), tokenizer).text
    except PromptError as error:
        return Check(TEMPLATE, "failed", str(error), remedy)
    places = [told.find(turn["content"].strip()) for turn in turns.values()]
    opening = encode_plainly(tokenizer, told)[:2]
    wrong = [f"it changes or drops {n}" for n, at in zip(turns, places, strict=True) if at < 0]
    if places != sorted(places):
        wrong.append("it reorders the turns, or puts the instruction behind the passages")
    if list(opening) == [getattr(tokenizer, "bos_token_id", None)] * 2:
        wrong.append("it begins with the BOS token twice")
    if wrong:
        return Check(TEMPLATE, "failed", wrong[0], remedy)
    return Check(TEMPLATE, "ok", "instruction, passages and turns stand as given, in order")


def check_precision(dtype: torch.dtype, checkpoint: torch.dtype | None) -> Check:
    """Check the model's dtype. checkpoint: of its weights on disk, if it is known."""
    if checkpoint == torch.bfloat16 and dtype == torch.float16:
        wrong = "the weights are bfloat16 and run in float16, whose largest number is 65,504"
        return Check(PRECISION, "failed", wrong, "use --set dtype=bfloat16 or float32")
    return Check(PRECISION, "ok", str(dtype))


def check_exact(name: str, found: Measured) -> Check:
    """Check that the answer of a rule that is exact by construction is full prefill's."""
    why, compared = found.record.not_blended, _compared(found)
    if why:
        return Check(name, "failed", f"nothing was reused: {why}", "see the other checks")
    measured = {"kl": compared.kl}
    if compared.exact:
        told = f"the same but for rounding, KL {compared.kl:.1e}"
        return Check(name, "ok", told, measured=measured)
    told = f"KL {compared.kl:.3g} is more than rounding"
    remedy = "report the model; if it runs in half precision, try --set dtype=float32 first"
    return Check(name, "failed", told, remedy, measured)


def check_stored(
    engine: TransformersEngine, frame: PromptFrame, question: EvalQuestion, plain: Rule
) -> Check:
    """Check that a passage's stored KV is what full prefill computes, in every layer.

    The passage is the prompt's first, and only one. plain: reuses what was computed after the
    instruction, which is the prompt's beginning.
    """
    document = Document("first", (question.passages[0].text,))
    asked = replace(question, passages=tuple(document.to_chunks()), documents=(document,))
    encoded = engine.prepare(frame.prompt(asked)).encoded
    opens = not begins_as_rendered(engine.instruction, engine.tokenizer)
    lead = engine.encoder.leading(engine.instruction, opens=opens)
    span = next(iter(encoded.spans), None)
    if span is None or span.before or encoded.token_ids[: span.start] != lead:
        why = "the first passage is computed after other tokens than it stands at"
        return Check(STORED, "skipped", why)
    if (precision := engine.store.precision) != "native":
        why = f"precision={precision!r} rounds what is stored; fidelity shows what that costs"
        return Check(STORED, "skipped", why)
    (found,) = measure(engine, [frame.to_measure(asked)], [FULL, plain], warm=False)
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
