from __future__ import annotations

from dataclasses import replace

from cacheblend_rag import BlendConfig, BlendPrompt, Document, TransformersEngine
from cacheblend_rag.observe.explain import keeps_context
from tests.toy import TOY

DOCUMENT = Document("clara", ("Clara Berg is a teacher. " * 8, "She plays the violin. " * 8))


def test_only_a_document_lead_in_whose_context_is_whole_keeps_it():
    for lead_in, kept in (("document", True), ("instruction", False)):
        config = BlendConfig(min_tokens=0, protect_context=1)
        engine = TransformersEngine(TOY, config=config, lead_in=lead_in)
        engine.precompute([DOCUMENT])
        prompt = BlendPrompt.of(DOCUMENT.to_chunks()[1], "Question: What does she play?")
        report = engine.generate(prompt).report
        engine.close()
        assert report.blended
        assert keeps_context(report) is kept
        assert not keeps_context(replace(report, selector_reason=None))
