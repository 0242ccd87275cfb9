"""The gate passes a sound model, and each planted fault fails the check that is there for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from cacheblend_rag import BlendConfig, TieredKVStore, TransformersEngine, load_tokenizer
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.quality import verify
from cacheblend_rag.quality.fidelity import Fidelity
from cacheblend_rag.quality.verify import Verdict, check_template, frame_of, verify_engine
from cacheblend_rag.settings import Precision
from tests.models import GPT2_CONFIG
from tests.toy import TOY
from tests.toy.questions import toy_dataset

DATA = toy_dataset(("adjacent",), 1, 9_271_828)
SYSTEM_LAST = "{% for m in messages[1:] %}{{ m.content }}\n{% endfor %}{{ messages[0].content }}"
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}"
REFUSES_SYSTEM = "{{ raise_exception('no') if messages[0].role == 'system' }}" + DROPS_SYSTEM
SHOUTS = "{% for m in messages %}{{ m.content | upper }}\n{% endfor %}"
LAST_ALONE = "{{ messages[-2].content if messages | length == 2 }}{{ messages[-1].content }}"


def opened(*, tokenizer: Any = None, model: Any = None, **settings: Any) -> TransformersEngine:
    tokenizer = tokenizer or load_tokenizer(TOY)
    model = model or AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32)
    opening = frame_of(tokenizer, DATA).opening
    return TransformersEngine(model, tokenizer=tokenizer, instruction=opening, **settings)


def statuses(verdict: Verdict) -> dict[str, str]:
    return {check.name: check.status for check in verdict.checks}


def failed(verdict: Verdict) -> set[str]:
    return {check.name for check in verdict.failed}


def test_a_sound_model_passes_every_check() -> None:
    seen: list[str] = []
    verdict = verify_engine(opened(), DATA, on_check=lambda check: seen.append(check.name))
    assert set(statuses(verdict).values()) == {"ok"}
    assert seen == list(statuses(verdict))
    assert (verdict.passed, verdict.advice) == (True, "blend this model")
    plain = verdict.to_dict()
    assert (plain["model"], plain["dtype"], plain["device"]) == ("toy", "float32", "cpu")
    figures = {check["name"]: check["measured"] for check in plain["checks"]}
    assert figures["fidelity"]["kl"] < 1e-3 < figures["fidelity"]["kl_plain_reuse"]


@pytest.mark.parametrize(
    ("template", "status", "told"),
    [
        (DROPS_SYSTEM, "ok", "in order"),
        (REFUSES_SYSTEM, "ok", "in order"),
        (None, "skipped", "no chat template"),
        (SYSTEM_LAST, "failed", "puts the instruction behind the passages"),
        (SHOUTS, "failed", "changes or drops the instruction"),
        (LAST_ALONE, "failed", "changes or drops the instruction"),
    ],
)
def test_a_template_that_changes_or_reorders_texts_fails(
    template: str | None, status: str, told: str
) -> None:
    tokenizer = load_tokenizer(TOY)
    tokenizer.chat_template = template
    check = check_template(tokenizer, DATA)
    assert check.status == status
    assert told in check.found


@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_stored_kv_that_is_rounded_is_judged_by_fidelity(precision: Precision) -> None:
    verdict = verify_engine(opened(store=TieredKVStore.open(precision=precision)), DATA)
    assert verdict.passed
    (stored,) = [check for check in verdict.checks if check.name == "stored KV"]
    assert (stored.status, precision in stored.found) == ("skipped", True)


def test_stored_kv_that_is_not_what_prefill_computes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    put = TieredKVStore.put

    def scrambled(store: TieredKVStore, key: Any, kv: Any) -> Any:
        return put(store, key, ChunkKV.of(kv.keys, kv.values.flip(2), kv.position, kv.prior))

    monkeypatch.setattr(TieredKVStore, "put", scrambled)
    assert failed(verify_engine(opened(), DATA)) == {"stored KV", "fidelity"}


def test_float16_is_no_home_for_bfloat16_weights() -> None:
    model = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float16)
    engine = opened(model=model)
    verdict = verify_engine(engine, DATA, checkpoint=torch.bfloat16)
    assert failed(verdict) == {"precision"}
    assert verdict.advice == "put this right before you blend this model: precision"
    assert verify_engine(engine, DATA, checkpoint=torch.float16).passed


@pytest.mark.parametrize("noise", [2.0, float("nan")])
def test_a_model_that_is_not_itself_twice_fails(noise: float) -> None:
    engine = opened()
    head = engine.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, out: out + noise * torch.randn_like(out))
    assert "exactness" in failed(verify_engine(engine, DATA))


def test_a_blend_that_is_far_from_full_prefill_fails() -> None:
    reuse = BlendConfig(selector="none", recompute_ratio=0.0)
    verdict = verify_engine(opened(config=reuse, lead_in="instruction"), DATA)
    assert failed(verdict) == {"fidelity"}
    assert verdict.advice == "do not blend this model: it failed fidelity"


def test_a_model_that_cannot_be_blended_fails_without_kv() -> None:
    tokenizer = load_tokenizer(TOY)
    config = GPT2_CONFIG.__class__(**{**GPT2_CONFIG.to_dict(), "vocab_size": len(tokenizer)})
    torch.manual_seed(3)
    verdict = verify_engine(opened(tokenizer=tokenizer, model=GPT2LMHeadModel(config)), DATA)
    assert failed(verdict) == {"blending"}
    skipped = {name for name, status in statuses(verdict).items() if status == "skipped"}
    assert skipped == {"exactness", "stored KV", "fidelity"}


def test_the_packaged_questions_have_the_answer_last() -> None:
    data = verify.sample_questions()
    assert len(data.questions) == 6
    for question in data.questions:
        assert len(question.passages) == verify.PASSAGES
        assert any(answer in question.passages[-1].text for answer in question.answers)


@pytest.mark.parametrize(
    ("kl", "plain", "recomputes", "status"),
    [
        (0.05, 0.08, True, "ok"),
        (0.08, 0.05, True, "failed"),
        (0.05, 0.05, True, "failed"),
        (0.05, 0.05, False, "ok"),
        (0.0005, 0.0001, True, "ok"),
        (0.26, 0.9, True, "failed"),
        (0.26, 0.26, False, "failed"),
        (float("nan"), 0.1, True, "failed"),
    ],
)
def test_a_blend_must_be_near_and_nearer_than_plain_reuse(
    kl: float, plain: float, recomputes: bool, status: str
) -> None:
    blends, reuses = ([Fidelity(one)] * 3 for one in (kl, plain))
    assert verify.check_fidelity(blends, reuses, recomputes=recomputes).status == status
