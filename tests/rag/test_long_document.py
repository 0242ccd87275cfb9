"""A long document is answered window by window, each chunk computed once, and resumed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cacheblend_rag import (
    Reason,
    ReasonCode,
    SamplingParams,
    analyze_long_document,
)
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.rag.long_document import INSTRUCTION, default_lead_in
from tests.engines.toy_engine import ToyEngine
from tests.models import make_tokenizer, words

SIZES = {"chunk_tokens": 64, "overlap": 16, "window": 5}
SAMPLING = SamplingParams.greedy(max_tokens=6)
QUESTION = "w250 w251"


class CountingEngine(ToyEngine):
    """Notes which chunks it is asked to store, and which prompts it answers."""

    def __init__(self, window: int = 1 << 15, tokenizer=None, **settings):
        self._window = window
        self.stored, self.prompts = Counter(), []
        super().__init__(tokenizer or make_tokenizer(), **settings)

    @property
    def context_window(self):
        return self._window

    def _store(self, plans):
        self.stored.update(plan.key for plan in plans)
        return super()._store(plans)

    def _start(self, request):
        self.prompts.append(request.prepared.text)
        return super()._start(request)


def document(tokens=1000, seed=1):
    text = words(tokens, seed).split()
    return "\n\n".join(" ".join(text[at : at + 37]) for at in range(0, tokens, 37))


def analyze(engine, text=None, question=QUESTION, **options):
    asked = {**SIZES, "sampling": SAMPLING, **options}
    return analyze_long_document(engine, text or document(), question, **asked)


def test_each_chunk_is_computed_once_though_it_stands_in_five_windows():
    engine = CountingEngine()
    analysis = analyze(engine)
    assert engine.stored == Counter(), "nothing is computed before it is asked for"
    answers = list(analysis)
    report = analysis.report
    assert report.window == 5
    assert len(answers) == report.windows == report.chunks - 4
    assert set(engine.stored.values()) == {1}
    assert report.computed_chunks == len(engine.stored) == report.chunks
    assert all(one.answer.reused_tokens > 4 * 48 for one in answers)
    assert report.prompts == report.windows + 1, "the last one joins the answers"


@pytest.mark.parametrize("combine", ["map_reduce", "refine"])
def test_windows_shrink_to_a_small_context(combine):
    engine = CountingEngine(window=320)
    report = analyze(engine, combine=combine).result()
    assert 1 <= report.window < 5
    assert report.windows == report.chunks - report.window + 1
    assert report.computed_chunks == report.chunks
    assert report.answer


def test_map_reduce_joins_the_answers_of_all_windows():
    engine = CountingEngine()
    analysis = analyze(engine)
    parts = [f"Part {n}: {one.text}\n\n" for n, one in enumerate(analysis, start=1)]
    last = engine.prompts[-1]
    assert "".join(parts) in last
    assert analysis.report.answer == engine.generate(last, SAMPLING).text


def test_answers_that_do_not_fit_into_a_prompt_are_joined_in_rounds():
    engine = CountingEngine(window=260)
    analysis = analyze(engine, sampling=SamplingParams.greedy(max_tokens=30))
    windows = len(list(analysis))
    joining = engine.prompts[windows:]
    assert len(joining) > 2
    assert sum(prompt.count("Part ") for prompt in joining) == windows + len(joining) - 1
    assert analysis.report.answer


def test_refine_hands_each_window_the_answer_so_far():
    engine = CountingEngine()
    analysis = analyze(engine, combine="refine")
    texts = [one.text for one in analysis]
    assert len(engine.prompts) == len(texts)
    assert "This is the answer" not in engine.prompts[0]
    for text, prompt in zip(texts, engine.prompts[1:], strict=False):
        assert f"before these passages:\n{text}\n\n" in prompt
    assert analysis.report.answer == texts[-1]


@pytest.mark.parametrize("combine", ["map_reduce", "refine"])
def test_a_resumed_run_asks_only_what_is_missing(combine, tmp_path):
    kept, whole = tmp_path / "answers.jsonl", analyze(CountingEngine(), combine=combine).result()
    begun = analyze(CountingEngine(), combine=combine, resume=kept)
    before = [next(begun) for _ in range(3)]
    assert len(kept.read_text().splitlines()) == 3
    kept.write_text(f"{kept.read_text()}{{'key': unfin")

    engine = CountingEngine()
    analysis = analyze(engine, combine=combine, resume=kept)
    after = list(analysis)
    assert [one.text for one in after[:3]] == [one.text for one in before]
    assert [one.is_resumed for one in after] == [True] * 3 + [False] * (len(after) - 3)
    report = analysis.report
    assert (report.answer, report.resumed_prompts) == (whole.answer, 3)
    assert report.prompts == len(engine.prompts) == whole.prompts - 3
    assert report.computed_chunks == report.chunks - 3, "chunks of answered windows alone are not"
    other = analyze(CountingEngine(), combine=combine, resume=kept, question="w3").result()
    assert other.resumed_prompts == 0, "answers to other prompts are not taken"

    last = CountingEngine()
    assert analyze(last, combine=combine, resume=kept).result().answer == whole.answer
    assert not last.prompts
    assert not last.stored


def test_a_later_text_of_the_same_name_replaces_an_earlier_one():
    engine = CountingEngine()
    first = analyze(engine, document(400), document_id="report").result()
    engine.stored.clear()
    changed = f"{document(400)}\n\n{document(80, seed=2)}"
    second = analyze(engine, changed, document_id="report").result()
    assert second.chunks > first.chunks
    assert 0 < second.computed_chunks < second.chunks
    known = engine.registry.document("report", second.collection)
    assert len(known) == second.chunks


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"text": " \n"}, PromptError, "the document is empty"),
        ({"question": " "}, PromptError, "the question is empty"),
        ({"question": words(40_000, 1)}, PromptError, "shorten the question"),
        ({"chunk_tokens": 8}, ConfigError, "chunk_tokens=8 must be greater than or equal to 16"),
        ({"overlap": 33}, ConfigError, "overlap=33 must be at most half of chunk_tokens=64"),
        ({"window": 0}, ConfigError, "window=0"),
        ({"combine": "best"}, ConfigError, "combine='best'"),
    ],
)
def test_wrong_arguments_are_one_line_before_anything_is_computed(options, error, said):
    engine = CountingEngine()
    with pytest.raises(error, match=said) as caught:
        analyze(engine, **options)
    assert "\n" not in str(caught.value)
    assert not engine.stored


def test_an_answer_that_is_longer_in_other_tokens_is_shortened_in_prompts():
    class Longer(CountingEngine):
        def generate(self, prompt, *arguments, **options):
            answer = super().generate(prompt, *arguments, **options)
            return replace(answer, text=f"{answer.text} {words(300, 1)}")

    engine = Longer(window=320)
    analysis = analyze(engine, combine="refine", sampling=SamplingParams.greedy(max_tokens=1000))
    answers = list(analysis)
    assert len(answers) == analysis.report.windows
    for one, prompt in zip(answers, engine.prompts[1:], strict=False):
        held = prompt.partition("before these passages:\n")[2].partition("\n\n")[0]
        assert one.text.startswith(held)
        assert 60 < len(engine.tokenize(held)) <= 320 // 4


def test_a_chunk_that_fits_no_prompt_is_refused_with_the_size_that_would():
    with pytest.raises(ConfigError, match=r"chunk_tokens=64 must be at most \d+: prompts of"):
        analyze(CountingEngine(window=110))


def test_a_read_only_store_is_not_written_to():
    class ReadOnly(CountingEngine):
        read_only = True

    engine = ReadOnly()
    report = analyze(engine).result()
    assert (report.computed_chunks, report.reused_tokens) == (0, 0)
    assert not engine.stored
    assert report.answer
    assert len(engine.registry) == report.chunks


def test_chunks_that_cannot_be_stored_are_counted_and_computed_in_each_window():
    class Unblended(CountingEngine):
        blend_refusal = Reason(ReasonCode.UNSUPPORTED_MODEL, "its positions are learned")

    report = analyze(Unblended()).result()
    assert list(report.refused.values()) == [report.chunks]
    assert report.computed_chunks == 0
    assert report.answer


TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }} [end] {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "instruction", "before", "behind"),
    [
        (None, "", f"{INSTRUCTION}\n\n", ""),
        (TEMPLATE, "", f"[system] {INSTRUCTION} [end] [user] ", " [end] [assistant] "),
        (TEMPLATE, default_lead_in, f"[system] {INSTRUCTION} [end] [user] ", " [end] [assistant] "),
        (TEMPLATE, "Read:\n\n", "[system] Read: [end] [user] ", " [end] [assistant] "),
    ],
)
def test_prompts_begin_as_the_engines_chunks_were_computed(template, instruction, before, behind):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    engine = CountingEngine(tokenizer=tokenizer, instruction=instruction)
    analyze(engine, "w2 w3\n\nw4 w5", "Who?").result()
    assert engine.prompts == [f"{before}w2 w3\n\nw4 w5\n\nQuestion: Who?\nAnswer:{behind}"]
